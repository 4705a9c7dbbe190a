"""Kubernetes: a Job for each kind of part, which restarts its pods until the run is over, and Services of names."""

from typing import Any

from april.config import ConfigError
from april.launch.clusters import manifests
from april.launch.clusters.launcher import Launcher, ask
from april.launch.clusters.manifests import Object, Values
from april.words import counted

MANIFEST = "run.yaml"


class Kubernetes(Launcher):
    """The run's folder is on a volume that all pods can write; configuration and keys come from the manifest and from a
    Secret, made once by `kubectl create secret generic NAME-keys --from-file=KEYS`."""

    sees_files = False

    def files(self) -> dict[str, str]:
        values = Values(self.values(), self.prefix, self.layout.config.launch.namespace)
        objects = [made for needed, made in manifests.all_of(values) if not needed or values(needed)]
        return {MANIFEST: "---\n".join(map(manifests.as_yaml, objects))}

    @property
    def prefix(self) -> str:
        """Of all objects' names: the run's, as names of hosts are written."""
        text = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in self.layout.name.lower())
        return f"april-{text.strip('-')}"[:40].rstrip("-")

    def values(self) -> dict[str, Any]:
        """What manifests are made of. The configuration is as it is resolved, and beside it lie the modules of
        somebody's own that it names."""
        launch, layout = self.layout.config.launch, self.layout
        modules = {file.name: file.read_text() for file in layout.own_modules()}
        ranks = layout.ranks_a_node
        holder = self._pod(1, 0)
        return {
            "image": launch.image,
            "volume": launch.volume,
            "folder": str(layout.config.run.dir),
            "user": launch.user,
            "port": launch.port,
            "accelerator": launch.accelerator,
            "monitor": launch.monitor,
            "labels": launch.labels,
            "environment": launch.environment,
            "broker": holder,
            "learner": {"pods": launch.learner_nodes, **self._pod(ranks, layout.learner_accelerators)},
            "worker": {"pods": layout.counts.get("worker", 0), **self._pod(1, layout.worker_accelerators)},
            "scorer": {"pods": layout.counts.get("scorer", 0), **holder},
            "agents": {"pods": layout.counts.get("agents", 0), **holder},
            "files": {"config.toml": layout.config.to_toml(), **modules},
        }

    def _pod(self, ranks: int, accelerators: int) -> Object:
        launch = self.layout.config.launch
        return {
            "cores": launch.cores * ranks, "memory": f"{launch.memory_gb * ranks}Gi", "accelerators": accelerators,
        }  # fmt: skip

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
        return f"the run is stopping; then `{self._removal}`"

    @property
    def _removal(self) -> str:
        """The command that takes away what is left of a run that is over."""
        return f"kubectl delete job,service,configmap --selector april/run={self.prefix}"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        self._ask("patch", "job", f"{self.prefix}-worker", "--patch", f'{{"spec": {{"parallelism": {workers}}}}}')
        return f"asked for {counted(workers, 'worker')}"
