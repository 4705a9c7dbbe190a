"""Metrics sinks: where a run's figures go beside its folder, such as a service that draws curves."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april.broker.telemetry import SINKS
from april.config import ConfigError

log = logging.getLogger(__name__)


class Sink:
    """Made when the broker starts, also when it starts again: a step that was written is not written twice.

    It is called in the broker's loop, and has to be quick: what takes long belongs into a thread of its own.
    """

    package = ""
    """that has to be installed; the extra that brings it has its name"""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    @classmethod
    def check(cls) -> None:
        """Refuse to be used where something is missing. Raises ConfigError."""
        if cls.package and not find_spec(cls.package):
            raise ConfigError(
                f"key 'operations.sinks' = {cls.package!r} needs the package {cls.package}, which is not installed; "
                f"pip install 'april-rl[{cls.package}]', or leave it out"
            )

    def step(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl, of a step that was trained."""

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        """An evaluation that is complete: `step`, `accuracy`, `mean_at_k`, `pass_at_k`, .... `now`: Unix time."""

    def close(self) -> None:
        """The broker ends."""


class Sinks:
    """Those of a run. One that raises is left out from then on: figures are not worth a run."""

    def __init__(self, names: Sequence[str], run_dir: Path):
        """Raises ConfigError."""
        check_sinks(names)
        self._sinks: dict[str, Sink] = {name: SINKS.find(name)(run_dir) for name in names}
        self.failed: list[str] = []
        """those that were left out"""

    def step(self, record: dict[str, Any]) -> None:
        self._tell("step", record)

    def evaluation(self, result: dict[str, Any], now: float) -> None:
        self._tell("evaluation", result, now)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, what: str, *facts: Any) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                getattr(sink, what)(*facts)
            except Exception:
                log.exception("the metrics sink %s has failed, and is left out from here on; mend it", name)
                del self._sinks[name]
                self.failed.append(name)


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError unless each can be found and used."""
    for name in names:
        SINKS.find(name).check()
