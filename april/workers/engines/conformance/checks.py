"""What a check is, and what it is given: models, and engines that hold the weights of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from april.wire.version import Version
from april.workers.engines.base import Engine, EngineError, Request
from april.workers.engines.conformance.driving import V0, Stream, assert_true_logprobs
from april.workers.engines.conformance.models import TinyModel
from april.workers.engines.entry import EngineEntry


class MakeEngine(Protocol):
    def __call__(self, version: Version | None = V0, **options: Any) -> Engine:
        """An engine with the weights of `models()` under that version, without any for None.

        Options: `slots` = 8, `chunk_tokens` = 7, `max_context` = the model's. Only whole chunks are due.
        """


@dataclass(frozen=True)
class Bench:
    """Where one check looks at an engine."""

    entry: type[EngineEntry]
    make_engine: MakeEngine
    models: Callable[..., TinyModel]
    """models(architecture="qwen3", seed=0)"""

    def assert_true_logprobs(self, request: Request, stream: Stream, model: TinyModel | None = None) -> None:
        """Nothing is asked of an engine that says it does not draw from the model's distribution."""
        if self.entry.true_distribution:
            assert_true_logprobs(model or self.models(), request, stream)


@dataclass(frozen=True)
class Check:
    name: str
    """what is so, as a sentence"""
    function: Callable[..., None]
    arguments: Mapping[str, Any]
    of_true_distribution: bool
    """without meaning for an engine that says it has none"""
    interrupts: bool
    """ends requests, or changes weights below them"""

    def __str__(self) -> str:
        return self.name

    def concerns(self, entry: type[EngineEntry]) -> bool:
        return entry.true_distribution or not self.of_true_distribution

    def run(self, bench: Bench) -> None:
        """Raises AssertionError, or whatever the engine raises."""
        self.function(bench, **self.arguments)


CHECKS: list[Check] = []
"""all, in the order in which their modules are imported"""


def check(
    *,
    of_true_distribution: bool = False,
    interrupts: bool = False,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make checks of a function `name_that_is_a_sentence(bench, ...)`, one for each of the `cases`: its arguments by
    what the case is called."""

    def enlist(function: Callable[..., None]) -> Callable[..., None]:
        sentence = function.__name__.replace("_", " ")
        for case, arguments in (cases or {"": {}}).items():
            name = f"{sentence}: {case}" if case else sentence
            CHECKS.append(Check(name, function, arguments, of_true_distribution, interrupts))
        return function

    return enlist


def refusal(action: Callable[[], Any]) -> str:
    """The sentence with which an engine refuses. Raises AssertionError where it does not."""
    try:
        action()
    except EngineError as error:
        return str(error)
    raise AssertionError("it is not refused with an EngineError")
