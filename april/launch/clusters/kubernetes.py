"""Kubernetes: a Job for each kind of part, which restarts its pods until the run is over, and Services of names."""

from typing import Any

import yaml

from april.config import ConfigError
from april.launch.clusters.launcher import Launcher, ask
from april.registry import FOLDERS
from april.words import counted

MANIFEST = "run.yaml"
BESIDE, KEYS = "/april/run", "/april/keys"
"""where pods see the configuration, with modules of somebody's own beside it, and the keys of the run"""
CONFIG = f"{BESIDE}/config.toml"
HTTP_PORT = 9500
"""of the broker's /health and /metrics"""
GRACE_S = 120
"""for a pod that is asked to leave: a worker hands back what it has, a stopped learner writes its checkpoint"""
RETRIES = 1_000_000
"""of a Job: whether a run still gets on is for April to say, which ends with status 0 when it is over"""
Object = dict[str, Any]


class Kubernetes(Launcher):
    """The run's folder is on a volume that all pods can write; configuration and keys come from the manifest and from a
    Secret, made once by `kubectl create secret generic NAME-keys --from-file=KEYS`."""

    sees_files = False

    def files(self) -> dict[str, str]:
        objects = [
            self._configuration(),
            self._service("broker"),
            self._service("learner"),
            self._broker(),
            self._learner(),
        ]
        objects += [self._holders(role, count) for role, count in self.layout.counts.items()]
        return {MANIFEST: yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=None, width=1000)}

    @property
    def prefix(self) -> str:
        """Of all objects' names: the run's, as names of hosts are written."""
        text = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in self.layout.name.lower())
        return f"april-{text.strip('-')}"[:40].rstrip("-")

    def _object(self, api: str, kind: str, name: str, **content: Any) -> Object:
        labels = {"app.kubernetes.io/name": "april", "april/run": self.prefix}
        metadata = {"name": f"{self.prefix}-{name}", "namespace": self.layout.config.launch.namespace, "labels": labels}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}

    def _configuration(self) -> Object:
        """As it is resolved, and beside it the modules of somebody's own that it names."""
        modules = {file.name: file.read_text() for file in self.layout.own_modules()}
        return self._object("v1", "ConfigMap", "config", data={"config.toml": self.layout.config.to_toml(), **modules})

    def _service(self, role: str) -> Object:
        """Names for pods, without an address of its own, so that a lane's port needs no entry."""
        ports = [{"name": "broker", "port": self.layout.config.launch.port}]
        if role == "broker":
            ports.append({"name": "http", "port": HTTP_PORT})
        selector = {"april/run": self.prefix, "april/part": role}
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
        return self._object("v1", "Service", role, spec=spec)

    @property
    def _address(self) -> str:
        return f"tcp://{self.prefix}-broker:{self.layout.config.launch.port}"

    def _broker(self) -> Object:
        bind = f"tcp://0.0.0.0:{self.layout.config.launch.port}"
        command = ["april", "part", "broker", CONFIG, f"--broker.bind={bind}", f"--operations.http=0.0.0.0:{HTTP_PORT}"]
        health = {"httpGet": {"path": "/health", "port": HTTP_PORT}, "periodSeconds": 10}
        probes = {
            "startupProbe": health | {"failureThreshold": 360},
            "readinessProbe": health,
            "livenessProbe": health | {"failureThreshold": 12},
        }
        return self._job("broker", command, 1, 0, self.layout.config.launch.cores, probes)

    def _learner(self) -> Object:
        launch, layout = self.layout.config.launch, self.layout
        command = ["april", "part", "learner", CONFIG, "--connect", self._address]
        if launch.learner_nodes > 1:
            meeting = f"{self.prefix}-learner-0.{self.prefix}-learner:{launch.port + 1}"
            node = "$(JOB_COMPLETION_INDEX)"
            command += ["--nodes", str(launch.learner_nodes), "--node", node, "--meeting", meeting]
        cores = launch.cores * layout.ranks_a_node
        job = self._job("learner", command, launch.learner_nodes, layout.learner_accelerators, cores)
        job["spec"] |= {"completions": launch.learner_nodes, "completionMode": "Indexed"}
        job["spec"]["template"]["spec"]["subdomain"] = f"{self.prefix}-learner"
        return job

    def _holders(self, role: str, count: int) -> Object:
        """Workers, scorers or agents processes, each called after its pod; as many as `parallelism` says, which may be
        changed while they run."""
        command = ["april", "part", role, CONFIG, "--connect", self._address, "--name", "$(POD)"]
        accelerators = self.layout.worker_accelerators if role == "worker" else 0
        return self._job(role, command, count, accelerators, self.layout.config.launch.cores)

    def _job(
        self, part: str, command: list[str], pods: int, accelerators: int, cores: int, probes: Object | None = None
    ) -> Object:
        launch, config = self.layout.config.launch, self.layout.config
        limits: Object = {"memory": f"{launch.memory_gb * max(1, cores // launch.cores)}Gi"}
        if accelerators:
            limits[launch.accelerator] = accelerators
        variables = {FOLDERS: BESIDE} | launch.environment
        pod_name = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        container = {
            "name": part,
            "image": launch.image,
            "command": [*command, "--restarts=0", f"--security.keys={KEYS}"],
            "env": [pod_name, *({"name": name, "value": value} for name, value in variables.items())],
            "resources": {"requests": {"cpu": cores, **limits}, "limits": limits},
            "volumeMounts": [
                {"name": "config", "mountPath": BESIDE, "readOnly": True},
                {"name": "keys", "mountPath": KEYS, "readOnly": True},
                {"name": "runs", "mountPath": str(config.run.dir)},
            ],
            **(probes or {}),
        }
        template = {
            "metadata": {"labels": {"april/run": self.prefix, "april/part": part}},
            "spec": {
                "restartPolicy": "OnFailure",
                "terminationGracePeriodSeconds": GRACE_S,
                "containers": [container],
                "volumes": [
                    {"name": "config", "configMap": {"name": f"{self.prefix}-config"}},
                    {"name": "keys", "secret": {"secretName": f"{self.prefix}-keys", "defaultMode": 0o400}},
                    {"name": "runs", "persistentVolumeClaim": {"claimName": launch.volume}},
                ],
            },
        }
        return self._object(
            "batch/v1", "Job", part, spec={"parallelism": pods, "backoffLimit": RETRIES, "template": template}
        )

    def write(self) -> list:
        missing = [key for key in ("image", "volume") if not getattr(self.layout.config.launch, key)]
        if missing:
            raise ConfigError(f"key 'launch.{missing[0]}' is not set, and pods need it; see docs/clusters.md")
        return super().write()

    def _ask(self, *words: str) -> str:
        return ask(["kubectl", "--namespace", self.layout.config.launch.namespace, *words])

    def submit(self) -> str:
        told = self._ask("apply", "--filename", str(self.folder / MANIFEST))
        self.remember(objects=self.prefix)
        return told

    def status(self) -> str:
        return self._ask("get", "jobs,pods", "--selector", f"april/run={self.prefix}")

    def logs(self, part: str) -> str:
        selector = f"april/run={self.prefix}" + (f",april/part={part}" if part else "")
        return self._ask("logs", "--selector", selector, "--prefix", "--tail", "20")

    def stop(self) -> str:
        """The broker's container is asked, as at any end of a pod: the learner has its time for a checkpoint."""
        self._ask("delete", "job", f"{self.prefix}-broker", "--wait=false")
        return f"the run is stopping; then `kubectl delete job,service,configmap --selector april/run={self.prefix}`"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        self._ask("patch", "job", f"{self.prefix}-worker", "--patch", f'{{"spec": {{"parallelism": {workers}}}}}')
        return f"asked for {counted(workers, 'worker')}"
