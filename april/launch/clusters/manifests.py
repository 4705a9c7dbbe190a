"""The objects of a run on Kubernetes: a Job for each kind of part, and Services that give pods names.

They are made of values. Where these are a configuration's, the objects can be applied; where they are places in the
template of a Helm chart, the same objects are that template.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from april.registry import FOLDERS

BESIDE, KEYS = "/april-run", "/april-keys"
"""where pods see the configuration, with modules of somebody's own beside it, and the keys of the run. No folder
`april`: Python would take that for a package where it is started beside it"""
CONFIG = f"{BESIDE}/config.toml"
HTTP_PORT = 9500
"""of the broker's /health and /metrics"""
GRACE_S = 120
"""for a pod that is asked to leave: a worker hands back what it has, a stopped learner writes its checkpoint"""
RETRIES = 1_000_000
"""of a Job: whether a run still gets on is for April to say, which ends with status 0 when it is over"""
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
    """(value without which it is left out, or nothing; object)."""
    yield "", thing(values, "v1", "ConfigMap", "config", data=values("files"))
    yield "", thing(values, "v1", "ConfigMap", "environment", data=values("environment"))
    yield "", service(values, "broker", {"broker": values("port"), "http": HTTP_PORT})
    yield "", broker(values)
    yield "", learner(values)
    for role in HOLDERS:
        yield f"{role}.pods", holders(values, role)
    yield "monitor", monitor(values)


def thing(values: Values, api: str, kind: str, name: str, labels: Any = None, **content: Any) -> Object:
    labels = labels or {"app.kubernetes.io/name": "april", "april/run": values.name}
    metadata = {"name": f"{values.name}-{name}", "namespace": values.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def service(values: Values, role: str, ports: Mapping[str, Any]) -> Object:
    """Names for pods, without an address of its own, so that a lane's port needs no entry."""
    entries = [{"name": name, "port": port} for name, port in ports.items()]
    selector = {"april/run": values.name, "april/part": role}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": entries}
    return thing(values, "v1", "Service", role, spec=spec)


def address(values: Values) -> str:
    return f"tcp://{values.name}-broker:{values('port')}"


def broker(values: Values) -> Object:
    bind = f"tcp://0.0.0.0:{values('port')}"
    command = ["april", "part", "broker", CONFIG, f"--broker.bind={bind}", f"--operations.http=0.0.0.0:{HTTP_PORT}"]
    health = {"httpGet": {"path": "/health", "port": HTTP_PORT}, "periodSeconds": 10}
    serving = {
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": health | {"failureThreshold": 360},
        "readinessProbe": health,
        "livenessProbe": health | {"failureThreshold": 12},
    }
    return job(values, "broker", command, 1, serving)


def learner(values: Values) -> Object:
    """Its machines are counted by the Job, and meet where the broker says."""
    across = [f"--nodes={values('learner.pods')}", "--node=$(JOB_COMPLETION_INDEX)"]
    command = ["april", "part", "learner", CONFIG, "--connect", address(values), *across]
    made = job(values, "learner", command, values("learner.pods"))
    made["spec"] |= {"completions": values("learner.pods"), "completionMode": "Indexed"}
    return made


def holders(values: Values, role: str) -> Object:
    """Workers, scorers or agents processes, each called after its pod; as many as `parallelism` says, which may be
    changed while they run."""
    command = ["april", "part", role, CONFIG, "--connect", address(values), "--name", "$(POD)"]
    return job(values, role, command, values(f"{role}.pods"))


def job(values: Values, part: str, command: list[str], pods: Any, serving: Object | None = None) -> Object:
    fixed = {"app.kubernetes.io/name": "april", "april/run": values.name, "april/part": part}
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
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE_S,
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
    template = {"metadata": {"labels": values.labels(fixed)}, "spec": spec}
    content = {"parallelism": pods, "backoffLimit": RETRIES, "template": template}
    return thing(values, "batch/v1", "Job", part, values.labels(fixed), spec=content)


def monitor(values: Values) -> Object:
    """For Prometheus' operator."""
    selector = {"matchLabels": {"april/run": values.name, "april/part": "broker"}}
    spec = {"selector": selector, "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}]}
    return thing(values, "monitoring.coreos.com/v1", "PodMonitor", "broker", spec=spec)


class Dumper(yaml.SafeDumper):
    """Lines stay lines, and an object that is met twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, represent)


def as_yaml(tree: object) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=10_000)
