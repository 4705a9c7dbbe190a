"""Helm: Kubernetes' manifests as a chart. Its template is made by what makes the manifests, of places for values."""

import re
from typing import Any

import yaml

from april.launch.clusters import manifests
from april.launch.clusters.kubernetes import Kubernetes
from april.launch.clusters.launcher import ask
from april.launch.clusters.manifests import DASHBOARD, MONITORING, RULES
from april.version import VERSION

CHART = "chart"
"""folder beside what else is submitted"""


class Helm(Kubernetes):
    """The chart serves any run; `values.yaml` in it are this run's."""

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
        told = ask(["helm", "upgrade", "--install", "--namespace", namespace, self.prefix, str(self.folder / CHART)])
        self.remember(objects=self.prefix)
        return told

    @property
    def _removal(self) -> str:
        return f"helm uninstall --namespace {self.layout.config.launch.namespace} {self.prefix}"


class Place(str):
    """Where a value goes. As a whole scalar it takes any value, as a part of another one words and numbers."""


class Places(manifests.Values):
    """Values that are not known yet: each is the place of an expression of the chart's template."""

    def __init__(self) -> None:
        self.expressions: list[str] = []
        super().__init__({}, self._place(".Release.Name"), self._place(".Release.Namespace"))

    def __call__(self, path: str) -> Any:
        return self._place(f".Values.{path}")

    def text(self, file: str) -> Any:
        return self._place(f'.Files.Get "{file}"')

    def tree_of(self, file: str) -> Any:
        return self._place(f'fromYaml (.Files.Get "{file}")')

    def labels(self, fixed: dict[str, str]) -> Any:
        return self._place(f"merge {self._dict(fixed)} .Values.labels")

    def amounts(self, part: str, fixed: dict[str, Any]) -> Any:
        count = f".Values.{part}.accelerators"
        some = f"ternary (dict .Values.accelerator {count}) (dict) (gt (int {count}) 0)"
        return self._place(f"merge {self._dict(fixed)} ({some})")

    def _dict(self, fixed: dict[str, Any]) -> str:
        pairs = [f'"{key}" {self._expression(text)}' for key, text in fixed.items()]
        return f"(dict {' '.join(pairs)})"

    def _place(self, expression: str) -> Place:
        self.expressions.append(expression)
        return Place(f"__{len(self.expressions) - 1}__")

    def _expression(self, text: str) -> str:
        return self.expressions[int(text.strip("_"))] if isinstance(text, Place) else f'"{text}"'

    def fill(self, text: str) -> str:
        """The text of a template, from that of an object."""
        text = re.sub(r"__whole_(\d+)__", lambda found: f"{{{{ toJson ({self._at(found)}) }}}}", text)
        return re.sub(r"__(\d+)__", lambda found: f"{{{{ {self._at(found)} }}}}", text)

    def _at(self, found: re.Match) -> str:
        return self.expressions[int(found[1])]


def represent(dumper: yaml.SafeDumper, place: Place) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", place.replace("__", "__whole_", 1))


manifests.Dumper.add_representer(Place, represent)


def template() -> str:
    places = Places()
    texts = []
    for needed, made in manifests.all_of(places):
        text = f"---\n{places.fill(manifests.as_yaml(made))}"
        value = needed.removeprefix(manifests.UNLESS)
        condition = needed.replace(value, f".Values.{value}")
        texts.append(f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if needed else text)
    return "".join(texts)
