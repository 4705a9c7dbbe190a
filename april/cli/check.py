"""`april check`: the conformance suites of engines and schedules."""

from collections.abc import Callable
from typing import Any

from april.cli.command import command, option
from april.util.errors import ConfigError


@command(
    option("kind", choices=("engine", "schedule"), help="Kind of part to test."),
    option("part", metavar="NAME", help="Name of a shipped part, or package.module:Class of your own."),
    overrides=True,
)
def check(kind: str, part: str, overrides: list[str]) -> int:
    """Test an engine or a schedule against the contract that all of its kind keep."""
    if not __debug__:
        raise ConfigError("checks are assertions, which `python -O` leaves out; run it without -O")
    failures = suite_of(kind)(part, overrides, lambda line: print(line, flush=True))
    print(f"{failures} checks fell short" if failures else "it keeps to everything that was checked")
    return 1 if failures else 0


def suite_of(kind: str) -> Callable[..., Any]:
    """The conformance suite for parts of this kind ("engine" or "schedule"): (part, overrides, print function) ->
    number of failures. Raises ConfigError."""
    try:
        if kind == "engine":
            from april.workers.engines.conformance.suite import check_engine_named

            return check_engine_named
        from april.broker.conformance.suite import check_schedule_named

        return check_schedule_named
    except ImportError as error:
        raise ConfigError(
            f"checking needs the package {error.name}, which is not installed; run `pip install 'april-rl[check]'`"
        ) from None
