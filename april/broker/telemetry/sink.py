"""Metrics sinks: receivers of a run's metrics besides its folder, such as a service that draws curves."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april.broker.telemetry import SINKS
from april.errors import refuse

log = logging.getLogger(__name__)


class Sink:
    """Base class of metrics sinks, created at each start of the broker; no step is passed to a sink again.

    Its methods run in the broker's loop and have to be fast; `BackgroundSink` writes in a thread of its own.
    """

    package = ""
    """Python package it needs; the extra of April that installs it has the same name."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if something that the sink needs is missing."""
        if cls.package and not find_spec(cls.package):
            refuse(
                "operations.sinks",
                cls.package,
                f"needs the package {cls.package}, which is not installed",
                f"pip install 'april-rl[{cls.package}]', or leave it out",
            )

    def step(self, record: dict[str, Any]) -> None:
        """Receive the record of a trained step, as in metrics.jsonl."""

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        """Receive a complete evaluation: `step`, `accuracy`, `mean_at_k`, `pass_at_k`, .... `now`: Unix seconds."""

    def close(self) -> None:
        """Close the sink at the end of the broker."""


class Sinks:
    """The sinks of a run. One that raises an exception is dropped, since no metric is worth a run."""

    def __init__(self, names: Sequence[str], run_dir: Path):
        """Raises ConfigError for a sink that is not found, or that lacks something."""
        check_sinks(names)
        self._sinks: dict[str, Sink] = {name: SINKS.find(name)(run_dir) for name in names}
        self.failed: list[str] = []
        """Names of the sinks that were dropped."""

    def step(self, record: dict[str, Any]) -> None:
        self._call("step", record)

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        self._call("evaluation", result, now)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                getattr(sink, method)(*arguments)
            except Exception:
                log.exception("the metrics sink %s has failed, and is left out from here on; mend it", name)
                del self._sinks[name]
                self.failed.append(name)


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError unless every sink is found and has what it needs."""
    for name in names:
        SINKS.find(name).check()
