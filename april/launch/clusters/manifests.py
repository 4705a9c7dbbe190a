"""The objects of a run on Kubernetes: the broker a StatefulSet, of which there are never two, the learner an Indexed
Job, which has an end, workers a Deployment, and Services that give pods names.

Pods of the broker and of workers are started again whatever they end with. So the broker's asks Kubernetes for none of
them once the run is over (`april.launch.clusters.in_pod`). It may do that, see whether it is wanted itself, and nothing
else.

They are made of values. Where these are a configuration's, the objects can be applied; where they are places in the
template of a Helm chart, the same objects are that template.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from april.launch.part import STOP_S
from april.registry import FOLDERS

BESIDE, KEYS = "/april-run", "/april-keys"
"""where pods see the configuration, with modules of somebody's own beside it, and the keys of the run. No folder
`april`: Python would take that for a package where it is started beside it"""
CONFIG = f"{BESIDE}/config.toml"
JOURNAL = "/april-journal"
"""where the broker's pod sees its own volume, if it has one"""
OWN_VOLUME, UNLESS = "journal.gb", "not "
MONITORING, DASHBOARD, RULES = Path(__file__).parents[1] / "monitoring", "april.json", "april.rules.yml"
HTTP_PORT = 9500
"""of the broker's /health and /metrics"""
GRACE_S = 120
"""for a pod that is asked to leave: a worker hands back what it has, a stopped learner writes its checkpoint"""
BROKER_GRACE_S = int(STOP_S) + GRACE_S
"""the broker waits for the others"""
RETRIES = 1_000_000
"""of a Job: whether a run still gets on is for April to say, which ends with status 0 when it is over"""
IN_POD = "april.launch.clusters.in_pod"
AS_NOBODY = {"automountServiceAccountToken": False}
"""a pod that asks nothing of Kubernetes"""
HOLDERS = ("worker", "scorer", "agents")
Object = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """Of one run, as they are said on the page about clusters."""

    tree: Mapping[str, Any]
    name: str
    """of the run among others of its namespace; the objects' names begin with it"""
    namespace: str

    def __call__(self, path: str) -> Any:
        """`values("worker.pods")`."""
        found: Any = self.tree
        for key in path.split("."):
            found = found[key]
        return found

    def has(self, needed: str) -> bool:
        """`needed`: as `all_of` says it."""
        found = not needed or self(needed.removeprefix(UNLESS))
        return bool(found) != needed.startswith(UNLESS)

    def text(self, file: str) -> Any:
        """Of a file of `MONITORING`."""
        return (MONITORING / file).read_text()

    def tree_of(self, file: str) -> Any:
        """The content of one in YAML."""
        return yaml.safe_load(self.text(file))

    def labels(self, fixed: dict[str, str]) -> Any:
        return {**self("labels"), **fixed}

    def amounts(self, part: str, fixed: Object) -> Any:
        """With the accelerators of a pod, if it has some."""
        count = self(f"{part}.accelerators")
        return fixed | ({self("accelerator"): count} if count else {})

    def resources(self, part: str) -> Object:
        limits: Object = {"memory": self(f"{part}.memory")}
        requests = {"cpu": self(f"{part}.cores"), **limits}
        return {"requests": self.amounts(part, requests), "limits": self.amounts(part, limits)}


def all_of(values: Values) -> Iterator[tuple[str, Object]]:
    """(value without which it is left out, one with which it is, or nothing; object)."""
    yield "", thing(values, "v1", "ConfigMap", "config", data=values("files"))
    yield "", thing(values, "v1", "ConfigMap", "environment", data=values("environment"))
    yield "", service(values, "broker", {"broker": values("port"), "http": HTTP_PORT})
    yield from ending(values)
    yield f"{UNLESS}{OWN_VOLUME}", broker(values)
    yield OWN_VOLUME, broker(values, with_volume=True)
    yield "", learner(values)
    for role in HOLDERS:
        yield f"{role}.pods", holders(values, role)
    for made in monitoring(values):
        yield "monitor", made


def thing(values: Values, api: str, kind: str, name: str, labels: Any = None, **content: Any) -> Object:
    labels = labels or {"app.kubernetes.io/name": "april", "april/run": values.name}
    metadata = {"name": f"{values.name}-{name}", "namespace": values.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def service(values: Values, role: str, ports: Mapping[str, Any]) -> Object:
    """Names for pods, without an address of its own, so that a lane's port needs no entry."""
    entries = [{"name": name, "port": port} for name, port in ports.items()]
    pods = selector(values, role)["matchLabels"]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods, "ports": entries}
    return thing(values, "v1", "Service", role, spec=spec)


def address(values: Values) -> str:
    return f"tcp://{values.name}-broker:{values('port')}"


def ending(values: Values) -> Iterator[tuple[str, Object]]:
    """What the broker's pod may do of Kubernetes: have no pods of this run any more, and see whether it is wanted."""
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
    yield "", thing(values, "v1", "ServiceAccount", "broker")
    yield "", thing(values, api, "Role", "broker", rules=rules)
    yield "", thing(values, api, "RoleBinding", "broker", subjects=[subject], roleRef=role)


def broker(values: Values, with_volume: bool = False) -> Object:
    """`with_volume`: of its own, for the journal; the pod that takes another's place has the same."""
    bind = f"tcp://0.0.0.0:{values('port')}"
    part = ["april", "part", "broker", CONFIG, f"--broker.bind={bind}", f"--operations.http=0.0.0.0:{HTTP_PORT}"]
    part += [f"--broker.journal_dir={JOURNAL}"] if with_volume else []
    command = ["python", "-m", IN_POD, values.name, str(HTTP_PORT), *part]
    health = {"httpGet": {"path": "/health", "port": HTTP_PORT}, "periodSeconds": 10}
    serving = {
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": health | {"failureThreshold": 360},
        "readinessProbe": health,
        "livenessProbe": health | {"failureThreshold": 12},
    }
    made = pods_of(values, "broker", command, serving)
    made["spec"] |= {"serviceAccountName": f"{values.name}-broker", "terminationGracePeriodSeconds": BROKER_GRACE_S}
    content = {
        "serviceName": f"{values.name}-broker",
        "replicas": 1,
        "selector": selector(values, "broker"),
        "template": made,
    }
    if with_volume:
        made["spec"]["containers"][0]["volumeMounts"].append({"name": "journal", "mountPath": JOURNAL})
        content["volumeClaimTemplates"] = [journal_claim(values)]
    return part_of(values, "apps/v1", "StatefulSet", "broker", content)


def journal_claim(values: Values) -> Object:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": values("journal.class"),
        "resources": {"requests": {"storage": f"{values(OWN_VOLUME)}Gi"}},
    }
    return {"metadata": {"name": "journal"}, "spec": spec}


def learner(values: Values) -> Object:
    """Its machines are counted by the Job, and meet where the broker says."""
    across = [f"--nodes={values('learner.pods')}", "--node=$(JOB_COMPLETION_INDEX)"]
    command = ["april", "part", "learner", CONFIG, "--connect", address(values), *across]
    made = pods_of(values, "learner", command)
    made["spec"] |= {"restartPolicy": "OnFailure"} | AS_NOBODY
    pods = values("learner.pods")
    content = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "suspend": False,
        "backoffLimit": RETRIES,
        "template": made,
    }
    return part_of(values, "batch/v1", "Job", "learner", content)


def holders(values: Values, role: str) -> Object:
    """Workers, scorers or agents processes, each called after its pod; as many as `replicas` says, which may be changed
    while they run."""
    command = ["april", "part", role, CONFIG, "--connect", address(values), "--name", "$(POD)"]
    made = pods_of(values, role, command)
    made["spec"] |= AS_NOBODY
    content = {
        "replicas": values(f"{role}.pods"),
        "selector": selector(values, role),
        "strategy": {"type": "Recreate"},
        "template": made,
    }
    return part_of(values, "apps/v1", "Deployment", role, content)


def selector(values: Values, part: str) -> Object:
    return {"matchLabels": {"april/run": values.name, "april/part": part}}


def labels_of(values: Values, part: str) -> Any:
    return values.labels({"app.kubernetes.io/name": "april", "april/run": values.name, "april/part": part})


def part_of(values: Values, api: str, kind: str, part: str, spec: Object) -> Object:
    return thing(values, api, kind, part, labels_of(values, part), spec=spec)


def pods_of(values: Values, part: str, command: list[str], serving: Object | None = None) -> Object:
    """The template of a part's pods. A pod that is asked to leave hands back what it has, or writes it down."""
    container = {
        "name": part,
        "image": values("image"),
        "command": [*command, "--restarts=0", f"--security.keys={KEYS}"],
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": FOLDERS, "value": BESIDE},
        ],
        "envFrom": [{"configMapRef": {"name": f"{values.name}-environment"}}],
        "resources": values.resources(part),
        "volumeMounts": [
            {"name": "config", "mountPath": BESIDE, "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "runs", "mountPath": values("folder")},
            {"name": "memory", "mountPath": "/dev/shm"},  # 64 MB otherwise: too few for NCCL and for servers of engines
        ],
        **(serving or {}),
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
    """For Prometheus' operator, and for a Grafana that looks for dashboards by their label."""
    operator, about = "monitoring.coreos.com/v1", {"app.kubernetes.io/name": "april", "april/run": values.name}
    endpoints = [{"port": "http", "path": "/metrics"}]
    pods = {"selector": selector(values, "broker"), "podMetricsEndpoints": endpoints}
    yield thing(values, operator, "PodMonitor", "broker", spec=pods)
    yield thing(values, operator, "PrometheusRule", "broker", spec=values.tree_of(RULES))
    board = {DASHBOARD: values.text(DASHBOARD)}
    yield thing(values, "v1", "ConfigMap", "dashboard", about | {"grafana_dashboard": "1"}, data=board)


class Dumper(yaml.SafeDumper):
    """Lines stay lines, and an object that is met twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, represent)


def as_yaml(tree: object) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=10_000)
