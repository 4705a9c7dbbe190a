"""What a configuration's [schedule] comes to: the ledger's rules, the schedule that drives it, what it can yield."""

from april.broker.bound import throughput_cap
from april.broker.continuous import ContinuousRules, ContinuousSchedule
from april.broker.ledger import Rules
from april.broker.rounds import RoundRules, RoundSchedule
from april.broker.schedule import Prompts, Schedule
from april.config import Config, ScheduleSection
from april.config.sections import AlgorithmSection

EXAMPLE_RATIO = 10.0
"""longest response over mean response, in the plan's example"""


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
    )


def make_schedule(section: ScheduleSection, prompts: Prompts) -> Schedule:
    train_last_batch = section.last_batch == "train"
    if section.kind == "continuous":
        return ContinuousSchedule(ContinuousRules(section.most_in_flight, section.max_steps, train_last_batch), prompts)
    rules = RoundRules(
        batch_groups=section.rollout_batch_size,
        round_groups=section.groups_per_round,
        max_steps=section.max_steps,
        partial_rollout=section.partial_rollout,
        overlap=section.overlap,
        train_last_batch=train_last_batch,
    )
    return RoundSchedule(rules, prompts)


def describe_plan(section: ScheduleSection) -> str:
    """What is started at a time, the bound, and the share of the throughput that it leaves; a line or two."""
    plan = (
        f"plan: {section.kind}, batches of {section.rollout_batch_size} groups of {section.n_samples_per_prompt}, "
        f"{section.most_in_flight} samples in flight, staleness at most {section.max_staleness}"
    )
    if section.groups_outlive_a_round and not section.partial_rollout:
        return f"{plan}\n      what is unfinished when a batch is complete is discarded"
    return f"{plan}\n      {describe_cap(section)}"


def advice(config: Config) -> str:
    """A sentence where tokens of older policy versions may be trained and nothing corrects them; otherwise empty."""
    schedule, algorithm, default = config.schedule, config.algorithm, AlgorithmSection()
    stale = schedule.max_staleness and (schedule.groups_outlive_a_round or schedule.overlap)
    if not stale or algorithm.corrections or algorithm.behaviour_coef or algorithm.proximal == "interpolated":
        return ""
    key = f"preset = {algorithm.preset!r}" if algorithm.preset else "corrections = []"
    return (
        f"algorithm.{key} corrects no stale token, and some may be up to {schedule.max_staleness} policy steps old; "
        f"the default is algorithm.proximal = {default.proximal!r}, "
        f"algorithm.corrections = {list(default.corrections)}, algorithm.behaviour_coef = {default.behaviour_coef:g}"
    )


def describe_cap(section: ScheduleSection) -> str:
    """The cap as a function of the lengths, which are not known before the run, with an example."""
    n, in_flight = section.n_samples_per_prompt, section.most_in_flight
    if section.groups_outlive_a_round:
        why, batches, groups = "the bound", section.batches_in_reach, section.rollout_batch_size
    else:
        why, batches, groups = "waiting for the longest response of every batch", 1, section.groups_per_round
    free_ratio = batches * groups * n / in_flight
    example = throughput_cap(batches, groups, n, in_flight, mean_length=1.0, longest=EXAMPLE_RATIO)
    return (
        f"{why} lets min(1, {free_ratio:.3g} x mean / longest response) of what could be generated be trained: "
        f"all of it up to longest = {free_ratio:.3g} x mean, {example:.0%} at {EXAMPLE_RATIO:g} x mean"
    )
