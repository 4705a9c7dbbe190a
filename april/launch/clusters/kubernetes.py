"""Kubernetes: submits a run as one manifest or as a Helm chart, and operates it with kubectl."""

import re
from typing import Any

import yaml

from april.launch.clusters import manifests
from april.launch.clusters.launcher import Launcher, ask
from april.launch.clusters.manifests import DASHBOARD, MONITORING, RULES, Object, Values
from april.util.errors import refuse
from april.util.text import counted
from april.version import VERSION

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
        """Values, by name, that the manifests are built from: those of [launch], the sizes of the parts' pods, the
        resolved configuration, and the text of the user's own modules that the configuration names."""
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


# --- Helm -------------------------------------------------------------------------------------------------------------

CHART = "chart"
"""Name of the chart's folder in the launch folder."""


class Helm(Kubernetes):
    """Submits a run with Helm. The chart fits every run; its `values.yaml` holds the values of this one."""

    def files(self) -> dict[str, str]:
        about = {"apiVersion": "v2", "name": "april", "version": VERSION, "appVersion": VERSION, "type": "application"}
        about["description"] = "A run of April: broker, learner, workers"
        return {
            f"{CHART}/Chart.yaml": manifests.as_yaml(about),
            f"{CHART}/values.yaml": manifests.as_yaml(self.values()),
            f"{CHART}/templates/run.yaml": template(),
            **{f"{CHART}/{name}": (MONITORING / name).read_text() for name in (DASHBOARD, RULES)},
        }

    def submit(self) -> str:
        self._forget_learner()
        namespace = self.layout.config.launch.namespace
        output = ask(["helm", "upgrade", "--install", "--namespace", namespace, self.prefix, str(self.folder / CHART)])
        self.remember(objects=self.prefix)
        return output

    @property
    def _removal(self) -> str:
        return f"helm uninstall --namespace {self.layout.config.launch.namespace} {self.prefix}"


class Placeholder(str):
    """Text that stands for an expression of a Helm template in an object's YAML. If it is a whole YAML scalar, the
    expression can give any value; inside a longer text it can give a word or a number."""


class TemplateValues(manifests.Values):
    """Values from which the objects of a Helm chart's template are built: each is a placeholder for a template
    expression."""

    def __init__(self) -> None:
        self.expressions: list[str] = []
        super().__init__({}, self._placeholder(".Release.Name"), self._placeholder(".Release.Namespace"))

    def __call__(self, path: str) -> Any:
        return self._placeholder(f".Values.{path}")

    def text(self, file: str) -> Any:
        return self._placeholder(f'.Files.Get "{file}"')

    def tree_of(self, file: str) -> Any:
        return self._placeholder(f'fromYaml (.Files.Get "{file}")')

    def labels(self, base: dict[str, str]) -> Any:
        return self._placeholder(f"merge {self._dict(base)} .Values.labels")

    def amounts(self, part: str, base: dict[str, Any]) -> Any:
        count = f".Values.{part}.accelerators"
        some = f"ternary (dict .Values.accelerator {count}) (dict) (gt (int {count}) 0)"
        return self._placeholder(f"merge {self._dict(base)} ({some})")

    def _dict(self, base: dict[str, Any]) -> str:
        pairs = [f'"{key}" {self._expression(text)}' for key, text in base.items()]
        return f"(dict {' '.join(pairs)})"

    def _placeholder(self, expression: str) -> Placeholder:
        self.expressions.append(expression)
        return Placeholder(f"__{len(self.expressions) - 1}__")

    def _expression(self, text: str) -> str:
        return self.expressions[int(text.strip("_"))] if isinstance(text, Placeholder) else f'"{text}"'

    def fill(self, text: str) -> str:
        """`text`, the YAML of an object, with each `Placeholder` replaced by its expression of the Helm template."""
        text = re.sub(r"__whole_(\d+)__", lambda found: f"{{{{ toJson ({self._expression_of(found)}) }}}}", text)
        return re.sub(r"__(\d+)__", lambda found: f"{{{{ {self._expression_of(found)} }}}}", text)

    def _expression_of(self, found: re.Match) -> str:
        return self.expressions[int(found[1])]


def represent(dumper: yaml.SafeDumper, placeholder: Placeholder) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", placeholder.replace("__", "__whole_", 1))


manifests.ManifestDumper.add_representer(Placeholder, represent)


def template() -> str:
    """YAML template of the Helm chart: all Kubernetes objects of a run, each with the condition under which it is
    created."""
    values = TemplateValues()
    texts = []
    for condition_value, manifest in manifests.all_of(values):
        text = f"---\n{values.fill(manifests.as_yaml(manifest))}"
        value = condition_value.removeprefix(manifests.UNLESS)
        condition = condition_value.replace(value, f".Values.{value}")
        texts.append(f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition_value else text)
    return "".join(texts)
