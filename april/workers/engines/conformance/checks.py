"""Definition of a conformance check, and the bench that provides it with engines and models."""

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
        """An engine with the weights of `models()` under `version`; without weights if that is None.

        Options, with defaults: `slots` = 8, `chunk_tokens` = 7, `max_context` = the model's. Ticks are off: only full
        chunks are due.
        """


@dataclass(frozen=True)
class Bench:
    """What a check gets: the engine's entry, and functions that make engines and models."""

    entry: type[EngineEntry]
    make_engine: MakeEngine
    models: Callable[..., TinyModel]
    """models(architecture="qwen3", seed=0)"""

    def assert_true_logprobs(self, request: Request, stream: Stream, model: TinyModel | None = None) -> None:
        """Compare log-probabilities with a plain forward pass, unless the entry's `true_distribution` is False."""
        if self.entry.true_distribution:
            assert_true_logprobs(model or self.models(), request, stream)


@dataclass(frozen=True)
class Check:
    name: str
    """The property that is checked, as a sentence."""
    function: Callable[..., None]
    arguments: Mapping[str, Any]
    of_true_distribution: bool
    """Whether the check applies only to engines with `true_distribution`."""
    interrupts: bool
    """Whether the check cancels requests, or changes weights while they run."""

    def __str__(self) -> str:
        return self.name

    def concerns(self, entry: type[EngineEntry]) -> bool:
        return entry.true_distribution or not self.of_true_distribution

    def run(self, bench: Bench) -> None:
        """Raises AssertionError, or whatever the engine raises."""
        self.function(bench, **self.arguments)


CHECKS: list[Check] = []
"""All checks, in the order in which their modules are imported."""


def check(
    *,
    of_true_distribution: bool = False,
    interrupts: bool = False,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that registers a function `name_that_is_a_sentence(bench, ...)` as checks.

    `cases`: arguments of the function by case name; each case is one check.
    """

    def enlist(function: Callable[..., None]) -> Callable[..., None]:
        sentence = function.__name__.replace("_", " ")
        for case, arguments in (cases or {"": {}}).items():
            name = f"{sentence}: {case}" if case else sentence
            CHECKS.append(Check(name, function, arguments, of_true_distribution, interrupts))
        return function

    return enlist


def refusal(action: Callable[[], Any]) -> str:
    """The text of the EngineError that `action` raises. Raises AssertionError if it raises none."""
    try:
        action()
    except EngineError as error:
        return str(error)
    raise AssertionError("it is not refused with an EngineError")
