"""Kubernetes: submits a run as one manifest, and operates it with kubectl."""

from typing import Any

from april.errors import refuse
from april.launch.clusters import manifests
from april.launch.clusters.launcher import Launcher, ask
from april.launch.clusters.manifests import Object, Values
from april.words import counted

MANIFEST = "run.yaml"


class Kubernetes(Launcher):
    """Launches a run on Kubernetes. The run folder is on a volume that all pods can write; the configuration is in the
    manifest, the keys in a Secret created by `kubectl create secret generic NAME-keys --from-file=KEYS`."""

    sees_files = False

    def files(self) -> dict[str, str]:
        values = Values(self.values(), self.prefix, self.layout.config.launch.namespace)
        objects = [manifest for condition, manifest in manifests.all_of(values) if values.has(condition)]
        return {MANIFEST: "---\n".join(map(manifests.as_yaml, objects))}

    @property
    def prefix(self) -> str:
        """Prefix of all object names: the run's name in the form of a host name."""
        text = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in self.layout.name.lower())
        return f"april-{text.strip('-')}"[:40].rstrip("-")

    def values(self) -> dict[str, Any]:
        """Values of the manifests, with the resolved configuration and the user's own modules that it names."""
        launch, layout = self.layout.config.launch, self.layout
        modules = {file.name: file.read_text() for file in layout.own_modules()}
        ranks = layout.ranks_a_node
        holder = self._pod(1, 0)
        return {
            "image": launch.image,
            "volume": launch.volume,
            "journal": {"gb": launch.journal_gb, "class": launch.journal_class or None},
            "folder": str(layout.config.run.dir),
            "user": launch.user,
            "port": launch.port,
            "accelerator": launch.accelerator,
            "monitor": launch.monitor,
            "labels": launch.labels,
            "annotations": launch.annotations,
            "priority": launch.priority_class,
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
            refuse(f"launch.{missing[0]}", None, "is not set, and pods need it", "see docs/clusters.md")
        return super().write()

    def _ask(self, *words: str) -> str:
        return ask(["kubectl", "--namespace", self.layout.config.launch.namespace, *words])

    def submit(self) -> str:
        self._forget_learner()
        output = self._ask("apply", "--filename", str(self.folder / MANIFEST))
        self.remember(objects=self.prefix)
        return output

    def _forget_learner(self) -> None:
        """Delete a completed learner Job, because applying it again would not start it."""
        done = f"status.successful={self.layout.config.launch.learner_nodes}"
        self._ask("delete", "jobs", "--selector", f"{self._selector},april/part=learner", "--field-selector", done)

    @property
    def _selector(self) -> str:
        return f"april/run={self.prefix}"

    def status(self) -> str:
        return self._ask("get", "statefulsets,deployments,jobs,pods", "--selector", self._selector)

    def logs(self, part: str) -> str:
        selector = self._selector + (f",april/part={part}" if part else "")
        return self._ask("logs", "--selector", selector, "--prefix", "--tail", "20")

    def stop(self) -> str:
        """Scale the broker's StatefulSet to zero: the broker stops the run after the learner's checkpoint, then scales
        the other pods to zero."""
        self._ask("scale", "statefulset", f"{self.prefix}-broker", "--replicas=0")
        return f"the run is stopping; to delete its objects afterwards, use `{self._removal}`"

    @property
    def _removal(self) -> str:
        """Command that deletes the objects of a run that is over."""
        kinds = "statefulset,deployment,job,service,configmap,serviceaccount,role,rolebinding"
        return f"kubectl delete {kinds} --selector {self._selector}"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        self._ask("scale", "deployment", f"{self.prefix}-worker", f"--replicas={workers}")
        return f"asked for {counted(workers, 'worker')}"
