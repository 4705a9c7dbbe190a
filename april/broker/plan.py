"""Derives the ledger's rules, the schedule and the printed plan of a run from [schedule] in its configuration."""

import functools
from collections.abc import Callable
from typing import Any

from april.broker.journal.files import JournalError
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Prompts, Rules
from april.broker.ledger.samples import Sample
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import LEDGER_ATTRIBUTES, Schedule, ScheduleFailed
from april.config import Config, ConfigError, ScheduleSection
from april.config.algorithms import used_algorithms
from april.config.section import section_with
from april.config.training import AlgorithmSection

EXAMPLE_RATIO = 10.0
"""Ratio of longest to mean response length for which the printed plan gives the throughput as an example."""


def ledger_rules(config: Config) -> Rules:
    schedule = config.schedule
    return Rules(
        batch_groups=schedule.rollout_batch_size,
        group_size=schedule.n_samples_per_prompt,
        max_staleness=schedule.max_staleness,
        max_attempts=config.broker.attempts,
        min_group_size=schedule.min_group_size,
        max_response_tokens=config.sampling.max_response_tokens,
        filtered=schedule.filters_groups,
        scored_apart=config.reward.where == "scorer",
        submitted=config.data.source == "submitted",
        keeps_discards=config.samples.every > 0,
        agents=config.agent.is_set,
    )


def make_schedule(section: ScheduleSection, prompts: Prompts) -> Schedule:
    """Build the schedule that `section.kind` names. Raises ConfigError if it cannot be found or built.

    Exceptions in the methods of a user's schedule become ScheduleFailed, and its view of the ledger is a
    `LedgerOfSchedule`.
    """
    kind = SCHEDULES.find(section.kind)
    if section.kind in SCHEDULES.shipped:
        return kind.from_config(section, prompts)
    schedule: Schedule = guarded(section.kind, kind.from_config)(section, prompts)
    for name in SCHEDULE_METHODS:
        setattr(schedule, name, guarded(section.kind, getattr(schedule, name)))
    return schedule


def section_of(kind: str) -> type[ScheduleSection]:
    """`ScheduleSection`, extended by the configuration keys that the schedule `kind` declares if it is a user's."""
    own = () if kind in SCHEDULES.shipped else ((SCHEDULES.key, SCHEDULES.find(kind)),)
    return section_with(ScheduleSection, own)


# --- schedules of the user's own --------------------------------------------------------------------------------------

SAMPLE_METHODS = ("urgent_sample", "next_sample", "next_for_agent")
SCHEDULE_METHODS = ("advance", "finished", "wants_prompts", "has_no_work", "floor", "hands_out", *SAMPLE_METHODS)
"""Names of the schedule methods that broker and simulator call."""


class LedgerOfSchedule:
    """View of a ledger for a user's schedule: only `LEDGER_ATTRIBUTES` can be read; others raise AttributeError."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        if name not in LEDGER_ATTRIBUTES:
            raise AttributeError(f"a schedule may not use ledger.{name}, but {', '.join(sorted(LEDGER_ATTRIBUTES))}")
        return getattr(self._ledger, name)


def guarded(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the schedule `kind`, so that its exceptions become ScheduleFailed, except for errors of the
    journal."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        seen = [LedgerOfSchedule(each) if isinstance(each, Ledger) else each for each in arguments]
        try:
            result = method(*seen)
            if method.__name__ in SAMPLE_METHODS and not isinstance(result, Sample | None):
                raise TypeError(f"it returned {result!r}, which is neither a sample nor None")
        except (JournalError, OSError, ConfigError):
            raise
        except Exception as error:
            raise ScheduleFailed(
                f"schedule {kind!r} failed in {method.__name__}: {type(error).__name__}: {error}; mend it, and try it "
                f"with `april check schedule {kind}`"
            ) from error
        return result

    return call


# --- the plan in words ------------------------------------------------------------------------------------------------


def describe_plan(section: ScheduleSection) -> str:
    """The plan in one or two sentences: samples in flight, staleness bound, and the share of the workers' generation
    throughput that can be trained."""
    kind = SCHEDULES.find(section.kind)
    plan = (
        f"plan: {section.kind}, batches of {section.rollout_batch_size} groups of {section.n_samples_per_prompt}, "
        f"{kind.samples_in_flight(section)} samples in flight, staleness at most {section.max_staleness}"
    )
    if kind.groups_outlive_a_round(section) and not section.partial_rollout:
        return f"{plan}\n      what is unfinished when a batch is complete is discarded"
    return f"{plan}\n      {describe_cap(section)}"


def corrects_staleness(algorithm: AlgorithmSection) -> bool:
    """Whether the loss accounts for tokens of earlier policies."""
    return bool(algorithm.corrections or algorithm.behaviour_coef or algorithm.proximal == "interpolated")


def advice(config: Config) -> str:
    """A warning if the run may train stale tokens without a correction for them; otherwise empty."""
    schedule, default = config.schedule, AlgorithmSection()
    outlive = SCHEDULES.find(schedule.kind).groups_outlive_a_round(schedule)
    stale = schedule.max_staleness and (outlive or schedule.overlap)
    bare = [table for table, each in used_algorithms(config).items() if not corrects_staleness(each)]
    if not stale or not bare:
        return ""
    preset = config.algorithm.preset if bare[0] == "algorithm" else ""
    key = f"preset = {preset!r}" if preset else "corrections = []"
    return (
        f"{bare[0]}.{key} corrects no stale token, and some may be up to {schedule.max_staleness} policy steps old; "
        f"the default is algorithm.proximal = {default.proximal!r}, "
        f"algorithm.corrections = {list(default.corrections)}, algorithm.behaviour_coef = {default.behaviour_coef:g}"
    )


def describe_cap(section: ScheduleSection) -> str:
    """Describe in a sentence which throughput the wait for the longest responses costs: none up to a ratio of longest
    to mean length, and with `EXAMPLE_RATIO` a share. The lengths are unknown before the run."""
    kind = SCHEDULES.find(section.kind)
    n, in_flight = section.n_samples_per_prompt, kind.samples_in_flight(section)
    batches, groups = kind.in_reach(section)
    why = "waiting for the longest response of every batch"
    if kind.groups_outlive_a_round(section):
        why = "the bound"
    free_ratio = batches * groups * n / in_flight
    example = throughput_cap(batches, groups, n, in_flight, mean_length=1.0, longest=EXAMPLE_RATIO)
    return (
        f"{why} costs no throughput while the longest response has at most {free_ratio:.3g} times the mean length; at "
        f"{EXAMPLE_RATIO:g} times {example:.0%} of it is left"
    )


def throughput_cap(
    batches: int, batch_groups: int, group_size: int, in_flight: int, mean_length: float, longest: float
) -> float:
    """Largest share, from 0 to 1, of the generation throughput without any barrier that can be trained.

    While the longest response, of `longest` tokens, is generated, `in_flight` samples produce in_flight * longest
    tokens: responses of `mean_length` tokens for in_flight * longest / (group_size * mean_length) groups. Until the
    group of the longest response has to be trained, no more than `batches` batches of `batch_groups` groups can be
    trained, so that

        share <= min(1, batches * batch_groups * group_size * mean_length / (in_flight * longest))

    `batches` is thus the number of batches any of which may train a group. With a largest staleness of S it is S + 1
    if groups are opened under the version that the next batch trains, and S if they are opened one version earlier. It
    is 1 if every batch waits for all of its groups.
    """
    return min(1.0, batches * batch_groups * group_size * mean_length / (in_flight * longest))
