"""The checks of the conformance suite of schedules, and the command `april check schedule`, which runs them."""

import traceback
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from april.broker.conformance.machine import ScheduleMachine
from april.broker.conformance.runs import BATCH, run_to_the_end, try_schedule
from april.broker.plan import describe_plan, section_of
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import ScheduleFailed
from april.config.checks import check_schedule
from april.util.errors import refuse

EXAMPLES, STEPS = 60, 40
"""Number of random runs of the state machine, and most actions in each run."""


def machine_of(name: str, base: type[ScheduleMachine] = ScheduleMachine) -> type[ScheduleMachine]:
    """A subclass of `base`, a state machine, for the schedule `name`. At a restart its broker may switch to another
    kind of schedule, and back."""
    others = tuple(other for other in SCHEDULES.shipped if other != name)
    return type("ScheduleMachine", (base,), {"kind": name, "others": others})


def the_plan_says_what_it_comes_to(name: str) -> None:
    section = section_of(name)(kind=name)
    check_schedule(section)
    kind = SCHEDULES.find(name)
    batches, groups = kind.in_reach(section)
    assert kind.samples_in_flight(section) >= 1 and batches >= 1 and groups >= 1
    assert name in describe_plan(section)


def every_line_of_the_simulator_is_a_schedule_that_it_takes(name: str) -> None:
    section = section_of(name)(kind=name)
    for keys in SCHEDULES.find(name).variants(section).values():
        check_schedule(section.model_copy(update={key: keys[key] for key in keys if "__" not in key}))


def a_run_without_faults_comes_to_its_end(name: str) -> None:
    run_to_the_end(section_of(name)(kind=name, **BATCH))


def long_runs_with_stragglers_and_any_load_come_to_their_end(name: str) -> None:
    try_schedule(section_of(name)(kind=name))


def prompts_may_run_out_before_a_batch_is_full(name: str) -> None:
    for last_batch in ("train", "drop"):
        run_to_the_end(section_of(name)(kind=name, last_batch=last_batch, **BATCH), prompts=10)


def ledger_and_bound_hold_and_nothing_starves_whatever_happens(name: str) -> None:
    run_state_machine_as_test(
        machine_of(name),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


CHECKS = (
    the_plan_says_what_it_comes_to,
    every_line_of_the_simulator_is_a_schedule_that_it_takes,
    a_run_without_faults_comes_to_its_end,
    long_runs_with_stragglers_and_any_load_come_to_their_end,
    prompts_may_run_out_before_a_batch_is_full,
    ledger_and_bound_hold_and_nothing_starves_whatever_happens,
)


def check_schedule_named(name: str, overrides: list[str], say: Callable[[str], None]) -> int:
    """Run every check on the schedule of that name and pass the results to `say`, line by line; returns the number of
    failed checks.

    Raises ConfigError for a schedule that cannot be found, and if there are `overrides` (settings on the command line).
    """
    if overrides:
        refuse(overrides[0], None, "means nothing to `april check schedule`", "leave it out")
    SCHEDULES.find(name)
    fell_short = 0
    for check in CHECKS:
        sentence = check.__name__.replace("_", " ")
        try:
            check(name)
        except Exception as error:
            fell_short += 1
            say(f"FELL SHORT  {sentence}\n{where(error)}")
        else:
            say(f"kept        {sentence}")
    return fell_short


def where(error: Exception) -> str:
    """Describe where and why a check failed with `error`: the error's message, hypothesis' notes on the actions that
    led to it, and the source lines of its traceback."""
    error = error.__cause__ if isinstance(error, ScheduleFailed) and isinstance(error.__cause__, Exception) else error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "hypothesis" not in frame.filename]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in frames[1:]]
    messages = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", [])]
    return "\n".join(f"    {line}" for part in (*messages, *lines) for line in part.splitlines())
