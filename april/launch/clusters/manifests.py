"""The Kubernetes objects of a run: the broker is a StatefulSet with one replica, the learner an Indexed Job, which
completes, the workers a Deployment; a Service names the broker's pod.

Kubernetes restarts the pods of the broker and the workers whatever their exit status. So at the end of the run the
broker's pod scales them to zero (`april.launch.clusters.broker_pod`). It may do that, read its own StatefulSet, and
nothing else.

The objects are built from values. With a configuration's values they can be applied; with the placeholders of
`april.launch.clusters.kubernetes` they are the template of a Helm chart.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from april.launch.part import STOP_S
from april.util.registry import FOLDERS_VARIABLE

CONFIG_FOLDER, KEYS = "/april-run", "/april-keys"
"""Mount paths of the configuration with the user's own modules, and of the run's keys. Not named `april`, which Python
would import as a package."""
CONFIG = f"{CONFIG_FOLDER}/config.toml"
JOURNAL = "/april-journal"
"""Mount path of the broker's own journal volume, if it has one."""
OWN_VOLUME, UNLESS = "journal.gb", "not "
MONITORING, DASHBOARD, RULES = Path(__file__).parents[1] / "monitoring", "april.json", "april.rules.yml"
HTTP_PORT = 9500
"""Port of the broker's /health and /metrics."""
GRACE_S = 120
"""Grace period of a stopped pod (seconds), in which a worker returns its samples and a learner writes its
checkpoint."""
BROKER_GRACE_S = int(STOP_S) + GRACE_S
"""Grace period of the broker's pod (seconds), since the broker waits for the other parts."""
RETRIES = 1_000_000
"""Backoff limit of the learner's Job, in effect none: April itself ends with status 0 when the run is over."""
IN_POD = "april.launch.clusters.broker_pod"
AS_NOBODY = {"automountServiceAccountToken": False}
"""Fields of the spec of a pod that gets no token for the Kubernetes API."""
HOLDERS = ("worker", "scorer", "agents")
Object = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """Values of one run's objects, as listed in `docs/clusters.md`."""

    tree: Mapping[str, Any]
    name: str
    """Prefix of the object names, unique in the namespace."""
    namespace: str

    def __call__(self, path: str) -> Any:
        """Value of a dotted path, as in `values("worker.pods")`."""
        found: Any = self.tree
        for key in path.split("."):
            found = found[key]
        return found

    def has(self, condition: str) -> bool:
        """Whether `condition` holds: the path of a value that must be set or, after `UNLESS`, must not be set; ""
        always holds."""
        found = not condition or self(condition.removeprefix(UNLESS))
        return bool(found) != condition.startswith(UNLESS)

    def text(self, file: str) -> Any:
        """Content of a file in `MONITORING`, the folder of April's files for Prometheus and Grafana."""
        return (MONITORING / file).read_text()

    def tree_of(self, file: str) -> Any:
        """Parsed content of a YAML file in `MONITORING`, the folder of April's files for Prometheus and Grafana."""
        return yaml.safe_load(self.text(file))

    def labels(self, base: dict[str, str]) -> Any:
        return {**self("labels"), **base}

    def amounts(self, part: str, base: Object) -> Any:
        """`base` (resources by name) with the accelerators of the part's pod added, if it has any."""
        count = self(f"{part}.accelerators")
        return base | ({self("accelerator"): count} if count else {})

    def resources(self, part: str) -> Object:
        limits: Object = {"memory": self(f"{part}.memory")}
        requests = {"cpu": self(f"{part}.cores"), **limits}
        return {"requests": self.amounts(part, requests), "limits": self.amounts(part, limits)}


def all_of(values: Values) -> Iterator[tuple[str, Object]]:
    """(condition, object) of every Kubernetes object of a run. The condition is the path of a value that must be set,
    or, after `UNLESS`, must not be set; "": always."""
    yield "", k8s_object(values, "v1", "ConfigMap", "config", data=values("files"))
    yield "", k8s_object(values, "v1", "ConfigMap", "environment", data=values("environment"))
    yield "", service(values, "broker", {"broker": values("port"), "http": HTTP_PORT})
    yield from broker_account(values)
    yield f"{UNLESS}{OWN_VOLUME}", broker(values)
    yield OWN_VOLUME, broker(values, with_volume=True)
    yield "", learner(values)
    for role in HOLDERS:
        yield f"{role}.pods", holders(values, role)
    for manifest in monitoring(values):
        yield "monitor", manifest


def k8s_object(values: Values, api: str, kind: str, name: str, labels: Any = None, **content: Any) -> Object:
    labels = labels or {"app.kubernetes.io/name": "april", "april/run": values.name}
    metadata = {"name": f"{values.name}-{name}", "namespace": values.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def service(values: Values, role: str, ports: Mapping[str, Any]) -> Object:
    """Headless Service that gives the pods of a `role` DNS names; without a cluster IP, weight channels can use any
    port. `ports`: number of each port, by its name."""
    entries = [{"name": name, "port": port} for name, port in ports.items()]
    pods = selector(values, role)["matchLabels"]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods, "ports": entries}
    return k8s_object(values, "v1", "Service", role, spec=spec)


def address(values: Values) -> str:
    return f"tcp://{values.name}-broker:{values('port')}"


def broker_account(values: Values) -> Iterator[tuple[str, Object]]:
    """Service account of the broker's pod, which may scale this run's pods and read its own StatefulSet."""
    scales = [f"{values.name}-{role}" for role in ("broker", *HOLDERS)]
    rules = [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets"],
            "resourceNames": [f"{values.name}-broker"],
            "verbs": ["get"],
        },
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale", "deployments/scale"],
            "resourceNames": scales,
            "verbs": ["patch"],
        },
        {
            "apiGroups": ["batch"],
            "resources": ["jobs"],
            "resourceNames": [f"{values.name}-learner"],
            "verbs": ["patch"],
        },
    ]
    api, name = "rbac.authorization.k8s.io/v1", f"{values.name}-broker"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": values.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    yield "", k8s_object(values, "v1", "ServiceAccount", "broker")
    yield "", k8s_object(values, api, "Role", "broker", rules=rules)
    yield "", k8s_object(values, api, "RoleBinding", "broker", subjects=[subject], roleRef=role)


def broker(values: Values, with_volume: bool = False) -> Object:
    """The broker's StatefulSet. `with_volume`: with a volume for the journal, which a replacing pod mounts again."""
    bind = f"tcp://0.0.0.0:{values('port')}"
    part = ["april", "part", "broker", CONFIG, f"--broker.bind={bind}", f"--operations.http=0.0.0.0:{HTTP_PORT}"]
    part += [f"--broker.journal_dir={JOURNAL}"] if with_volume else []
    command = ["python", "-P", "-m", IN_POD, values.name, str(HTTP_PORT), *part]
    health = {"httpGet": {"path": "/health", "port": HTTP_PORT}, "periodSeconds": 10}
    probes = {
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": health | {"failureThreshold": 360},
        "readinessProbe": health,
        "livenessProbe": health | {"failureThreshold": 12},
    }
    manifest = pod_template(values, "broker", command, probes)
    manifest["spec"] |= {"serviceAccountName": f"{values.name}-broker", "terminationGracePeriodSeconds": BROKER_GRACE_S}
    content = {
        "serviceName": f"{values.name}-broker",
        "replicas": 1,
        "selector": selector(values, "broker"),
        "template": manifest,
    }
    if with_volume:
        manifest["spec"]["containers"][0]["volumeMounts"].append({"name": "journal", "mountPath": JOURNAL})
        content["volumeClaimTemplates"] = [journal_claim(values)]
    return labelled_object(values, "apps/v1", "StatefulSet", "broker", content)


def journal_claim(values: Values) -> Object:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": values("journal.class"),
        "resources": {"requests": {"storage": f"{values(OWN_VOLUME)}Gi"}},
    }
    return {"metadata": {"name": "journal"}, "spec": spec}


def learner(values: Values) -> Object:
    """The learner's Job: its completion index is the node index, and the broker announces the rendezvous."""
    node_options = [f"--nodes={values('learner.pods')}", "--node=$(JOB_COMPLETION_INDEX)"]
    command = ["april", "part", "learner", CONFIG, "--connect", address(values), *node_options]
    manifest = pod_template(values, "learner", command)
    manifest["spec"] |= {"restartPolicy": "OnFailure"} | AS_NOBODY
    pods = values("learner.pods")
    content = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "suspend": False,
        "backoffLimit": RETRIES,
        "template": manifest,
    }
    return labelled_object(values, "batch/v1", "Job", "learner", content)


def holders(values: Values, role: str) -> Object:
    """Deployment of workers, scorers or agents processes, named after their pods; `replicas` may change at any time."""
    command = ["april", "part", role, CONFIG, "--connect", address(values), "--name", "$(POD)"]
    manifest = pod_template(values, role, command)
    manifest["spec"] |= AS_NOBODY
    content = {
        "replicas": values(f"{role}.pods"),
        "selector": selector(values, role),
        "strategy": {"type": "Recreate"},
        "template": manifest,
    }
    return labelled_object(values, "apps/v1", "Deployment", role, content)


def selector(values: Values, part: str) -> Object:
    return {"matchLabels": {"april/run": values.name, "april/part": part}}


def labels_of(values: Values, part: str) -> Any:
    return values.labels({"app.kubernetes.io/name": "april", "april/run": values.name, "april/part": part})


def labelled_object(values: Values, api: str, kind: str, part: str, spec: Object) -> Object:
    return k8s_object(values, api, kind, part, labels_of(values, part), spec=spec)


def pod_template(values: Values, part: str, command: list[str], probes: Object | None = None) -> Object:
    """Template of a part's pods. `command`: the container's command, without the options for restarts and keys, which
    are added; `probes`: fields of the container with its health probes."""
    container = {
        "name": part,
        "image": values("image"),
        "command": [*command, "--restarts=0", f"--security.keys={KEYS}"],
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": FOLDERS_VARIABLE, "value": CONFIG_FOLDER},
        ],
        "envFrom": [{"configMapRef": {"name": f"{values.name}-environment"}}],
        "resources": values.resources(part),
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "runs", "mountPath": values("folder")},
            {
                "name": "memory",
                "mountPath": "/dev/shm",
            },  # the default of 64 MB is too small for NCCL and for engine servers
        ],
        **(probes or {}),
    }
    user = values("user")
    spec = {
        "terminationGracePeriodSeconds": GRACE_S,
        "priorityClassName": values("priority"),
        "securityContext": {
            "runAsUser": user, "runAsGroup": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{values.name}-config"}},
            {"name": "keys", "secret": {"secretName": f"{values.name}-keys", "defaultMode": 0o400}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": values("volume")}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    metadata = {"labels": labels_of(values, part), "annotations": values("annotations")}
    return {"metadata": metadata, "spec": spec}


def monitoring(values: Values) -> Iterator[Object]:
    """Objects for the Prometheus operator, and a dashboard that Grafana finds by its label."""
    operator, about = "monitoring.coreos.com/v1", {"app.kubernetes.io/name": "april", "april/run": values.name}
    endpoints = [{"port": "http", "path": "/metrics"}]
    pods = {"selector": selector(values, "broker"), "podMetricsEndpoints": endpoints}
    yield k8s_object(values, operator, "PodMonitor", "broker", spec=pods)
    yield k8s_object(values, operator, "PrometheusRule", "broker", spec=values.tree_of(RULES))
    board = {DASHBOARD: values.text(DASHBOARD)}
    yield k8s_object(values, "v1", "ConfigMap", "dashboard", about | {"grafana_dashboard": "1"}, data=board)


class ManifestDumper(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as blocks, and no YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ManifestDumper.add_representer(str, represent)


def as_yaml(tree: object) -> str:
    return yaml.dump(tree, Dumper=ManifestDumper, sort_keys=False, default_flow_style=None, width=10_000)
