"""Helm: a run as a chart. The template comes from the code of the Kubernetes manifests, with placeholders for
values."""

import re
from typing import Any

import yaml

from april.launch.clusters import manifests
from april.launch.clusters.kubernetes import Kubernetes
from april.launch.clusters.launcher import ask
from april.launch.clusters.manifests import DASHBOARD, MONITORING, RULES
from april.version import VERSION

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
    """Stands for a template expression. As a whole scalar it can become any value, inside a text only a word or a
    number."""


class TemplateValues(manifests.Values):
    """Values of a chart's template: each one is a placeholder for a template expression."""

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
        """Replace the placeholders in an object's YAML by their template expressions."""
        text = re.sub(r"__whole_(\d+)__", lambda found: f"{{{{ toJson ({self._expression_of(found)}) }}}}", text)
        return re.sub(r"__(\d+)__", lambda found: f"{{{{ {self._expression_of(found)} }}}}", text)

    def _expression_of(self, found: re.Match) -> str:
        return self.expressions[int(found[1])]


def represent(dumper: yaml.SafeDumper, placeholder: Placeholder) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", placeholder.replace("__", "__whole_", 1))


manifests.ManifestDumper.add_representer(Placeholder, represent)


def template() -> str:
    """The chart's template: all objects of a run, each with its condition."""
    values = TemplateValues()
    texts = []
    for condition_value, manifest in manifests.all_of(values):
        text = f"---\n{values.fill(manifests.as_yaml(manifest))}"
        value = condition_value.removeprefix(manifests.UNLESS)
        condition = condition_value.replace(value, f".Values.{value}")
        texts.append(f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition_value else text)
    return "".join(texts)
