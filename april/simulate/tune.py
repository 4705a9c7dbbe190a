"""The smallest number of groups in a round (N'), or of samples in flight, close to the best throughput: for `april
tune` and `auto`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Dial
from april.config import Config, ConfigError
from april.config.checks import check_schedule
from april.config.costs import EngineCost
from april.simulate.scenario import LengthsSection, Scenario, check_scenario, load_scenario
from april.simulate.trace import record_trace, write_trace
from april.simulate.variants import SimulationResult, columns, evaluate, text_table, with_dial
from april.util.errors import refuse
from april.workers.engines import ENGINES

FACTORS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Tried values as multiples of one batch: of N for the number of groups opened in a round, of N * n for the number of
samples in flight. For the latter `FEWER_IN_FLIGHT` and the highest number possible are tried too. N: groups in a batch;
n: samples in a group."""
FEWER_IN_FLIGHT = (0.25, 0.5, 0.75, 1.0)
WITHIN = 0.02
"""A value counts as good as the best one if its throughput is lower by at most this share."""

HEADER = ("stale mean", "max", "KV peak", "buffer peak")
"""Columns of `TuningChoice.table` between those of the throughput and the last one, which says what is chosen."""


@dataclass(frozen=True)
class TuningChoice:
    key: str
    """Configuration key whose value was chosen, such as `schedule.in_flight`."""
    value: int
    why: str
    """Sentence part with the throughput, its share of the best and the staleness."""
    table: str
    """Text table of all tried values and what was measured for each."""


def tune(scenario: Scenario, most_staleness: float | None = None) -> TuningChoice:
    """Choose the value of the scenario's dial, the key that sets its schedule's concurrency. `most_staleness`: highest
    mean staleness of the trained tokens (steps); None: bounded only by `schedule.max_staleness`. Raises ConfigError if
    the schedule has no dial or no value is permitted."""
    if scenario.kind.dial is None:
        refuse(
            "schedule.kind",
            scenario.schedule.kind,
            "has nothing to tune",
            f"use {SCHEDULES.names_where(lambda kind: kind.dial)}",
        )
    key, results = candidates(scenario, scenario.kind.dial)
    permitted = [
        result for result in results if most_staleness is None or result.measures.staleness_mean <= most_staleness
    ]
    if not permitted:
        least = min(results, key=lambda result: result.measures.staleness_mean)
        refuse(
            "--mean-staleness",
            most_staleness,
            f"is below what any {key} reaches",
            f"the least is {least.measures.staleness_mean:.2f}, at {least.name}",
        )
    best = max(permitted, key=lambda result: result.consumed_per_s)
    chosen = next(result for result in permitted if result.consumed_per_s >= (1 - WITHIN) * best.consumed_per_s)
    lines = [
        [
            *columns(result, ("", "consumed/s")), f"{result.consumed_per_s / best.consumed_per_s:.3f}",
            *columns(result, HEADER),
            "too stale" if result not in permitted else "chosen" if result is chosen else "",
        ]
        for result in results
    ]  # fmt: skip
    bound = "" if most_staleness is None else f" of those with a mean staleness of at most {most_staleness:g}"
    why = (
        f"the smallest{bound} within {WITHIN:.0%} of the best ({best.name}: {best.consumed_per_s:,.0f} tokens/s); "
        f"it consumes {chosen.consumed_per_s:,.0f} tokens/s at a mean staleness of {chosen.measures.staleness_mean:.2f}"
        f", {chosen.limit_share:.0%} of what its engines generate without any barrier"
    )
    return TuningChoice(key, int(chosen.name), why, text_table(lines, (key, "consumed/s", "of best", *HEADER, "")))


def candidates(scenario: Scenario, dial: Dial) -> tuple[str, list[SimulationResult]]:
    """(configuration key of `dial`, results of simulating the scenario with each tried value of the key, in ascending
    order of the values). `dial`: the key of [schedule] that sets how many samples or groups are generated at a time. If
    it counts the groups opened in a round, only values above the number of groups in a batch are tried. If the
    staleness bound permits none of these, the number of groups in a batch is the only value."""
    schedule = scenario.schedule
    unit = dial.one_batch_value(schedule)
    most = schedule.batches_in_reach * unit
    if dial.counts_samples:
        most = min(most, scenario.engines.count * scenario.engines.slots)
        tried = {most, *(round(factor * unit) for factor in (*FEWER_IN_FLIGHT, *FACTORS))}
        values = sorted(value for value in tried if 1 <= value <= most)
    else:
        tried = {round(factor * unit) for factor in FACTORS}
        values = sorted(value for value in tried if unit < value <= most) or [unit]
    results = [evaluate(str(value), with_dial(scenario, schedule.kind, value)) for value in values]
    return f"schedule.{dial.key}", results


# --- `auto` in a run's schedule ---------------------------------------------------------------------------------------

DEFAULT_FACTOR = 2
"""Number of batches in flight that `auto` chooses if no response lengths are known to simulate with."""
PLAIN_COST = EngineCost(
    source="10 ms + 0.06 ms for each request", decode_base_s=0.01, decode_running_s=6e-5, decode_kv_s=0, prefill_s=2e-5
)
"""Cost model that `auto` simulates with if the real engine's costs are not known."""
TUNED_RESPONSES = 4096
"""Approximate number of responses measured for each tried value, after a warm-up of `max_staleness` + 1 batches."""
LEAST_STEPS = 4
TRACE_FILE = "lengths.jsonl"
"""File in the run folder with the response lengths on which the choice for `auto` was based."""


def resolve(config: Config, resumed: bool = False, folder: Path | None = None) -> tuple[Config, str]:
    """(configuration with a number in place of `auto`, sentence why); unchanged and "" if no key is `auto`.

    `resumed`: take the lengths from the run's journal, and write them as a trace into `folder` (default: the run's
    folder). Raises ConfigError.
    """
    key = config.schedule.automatic_key
    return decide(config, key, *choose(config, key, resumed, folder or config.run_dir)) if key else (config, "")


def resolve_as_recorded(config: Config) -> tuple[Config, str]:
    """As `resolve`, but with the value recorded in the run folder's config.toml if the run has begun."""
    key, path = config.schedule.automatic_key, config.run_dir / "config.toml"
    recorded_schedule = tomllib.loads(path.read_text()).get("schedule", {}) if key and path.exists() else {}
    if isinstance(recorded_schedule.get(key), int):
        return decide(config, key, recorded_schedule[key], "chosen when the run was started")
    return resolve(config, resumed=True)


def decide(config: Config, key: str, value: int, why: str) -> tuple[Config, str]:
    schedule = config.schedule.model_copy(update={key: value})
    check_schedule(schedule)
    return config.model_copy(update={"schedule": schedule}), f"schedule.{key} = {value}: {why}"


def choose(config: Config, key: str, resumed: bool, folder: Path) -> tuple[int, str]:
    """(value chosen for the configuration key `key`, part of a sentence that gives the reason). `resumed`, `folder`: as
    in `resolve`."""
    schedule = config.schedule
    if schedule.scenario and not schedule.scenario.is_file():
        refuse(
            "schedule.scenario",
            schedule.scenario,
            "does not exist",
            "give a file such as configs/published.toml, or leave it out",
        )
    scenario = load_scenario(schedule.scenario) if schedule.scenario else None
    lengths, source = scenario.lengths if scenario else None, f"of {schedule.scenario}"
    if resumed and (recorded := journal_lengths(config, folder)):
        lengths, source = recorded
    if lengths is None:
        batches = min(DEFAULT_FACTOR, schedule.batches_in_reach)
        value = batches * SCHEDULES.find(schedule.kind).dial.one_batch_value(schedule)
        return value, f"{batches} times the batch, since too few lengths are known; schedule.scenario can name some"
    choice = tune(tuning_scenario(config, scenario or Scenario(cost=PLAIN_COST), lengths))
    return choice.value, f"by the lengths {source}, {choice.why}"


def journal_lengths(config: Config, folder: Path) -> tuple[LengthsSection, str] | None:
    """(response lengths of the groups in the run's journal, as a trace, a text that describes them). None if the
    journal holds fewer complete groups than may be open at once under the staleness bound: then the longest responses
    would be missing."""
    try:
        recording = record_trace(config.run_dir)
    except ConfigError:
        return None
    if len(recording.groups) < config.schedule.batches_in_reach * config.schedule.rollout_batch_size:
        return None
    path = folder / TRACE_FILE
    write_trace(path, recording.groups)
    source = "of the run so far" + (f" ({recording.censored})" if recording.censored else "")
    return LengthsSection(family="trace", path=path), source


def tuning_scenario(config: Config, scenario: Scenario, lengths: LengthsSection) -> Scenario:
    """`scenario` with the schedule, response budget, slots and cache behaviour of the run of `config`, and so few steps
    that it can be simulated at a run's start. `lengths`: the response lengths to simulate with."""
    schedule = config.schedule.model_copy(update={config.schedule.automatic_key: None})
    engine = ENGINES.find(config.worker.engine)
    engines = config.worker.count * len(engine.engine_names(config, "worker"))
    batch = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    changes = {
        "schedule": schedule,
        "lengths": lengths.model_copy(update={"longest_tokens": config.sampling.max_response_tokens}),
        "engines": scenario.engines.model_copy(
            update={"count": engines, "slots": config.worker.slots, "prefix_cache": engine.keeps_prefixes}
        ),
        "weights": scenario.weights.model_copy(update={"keep_kv": config.engine.pause == "in_place"}),
        "warmup_steps": schedule.batches_in_reach,
        "steps": max(LEAST_STEPS, TUNED_RESPONSES // batch),
        "limit_responses": TUNED_RESPONSES,
    }
    return check_scenario(scenario.model_copy(update=changes))
