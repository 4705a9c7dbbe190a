"""Resolves `auto` in a run's schedule: the value that `april tune` would choose when the run starts.

The response lengths come from the run's own journal when it is resumed, otherwise from `schedule.scenario`; with
neither, the schedule starts two batches at a time, as in the published setting. The value is written into the run's
config.toml, so that a restarted broker keeps it; only `april run --resume` chooses again.
"""

import tomllib
from pathlib import Path

from april.broker.schedules import SCHEDULES
from april.config import Config, ConfigError
from april.config.checks import check_schedule
from april.config.costs import EngineCost
from april.errors import refuse
from april.simulate.lengths import LengthsSection
from april.simulate.recording import record_trace
from april.simulate.scenario import Scenario, check_scenario, load_scenario
from april.simulate.trace import write_trace
from april.simulate.tune import tune
from april.workers.engines import ENGINES

DEFAULT_FACTOR = 2
"""Batches started at a time if no lengths are known."""
PLAIN_COST = EngineCost(
    source="10 ms + 0.06 ms for each request", decode_base_s=0.01, decode_running_s=6e-5, decode_kv_s=0, prefill_s=2e-5
)
"""Cost model of an unknown engine."""
TUNED_RESPONSES = 4096
"""Responses measured per tried value, approximately, after a warm-up of S + 1 batches."""
LEAST_STEPS = 4
TRACE = "lengths.jsonl"
"""File in the run folder with the lengths that the choice was based on."""


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
    """(value of the key, sentence part why)."""
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
    """(lengths of the run's journal as a trace, description); None if it holds fewer groups than can wait for a
    straggler."""
    try:
        recording = record_trace(config.run_dir)
    except ConfigError:
        return None
    if len(recording.groups) < config.schedule.batches_in_reach * config.schedule.rollout_batch_size:
        return None
    path = folder / TRACE
    write_trace(path, recording.groups)
    source = "of the run so far" + (f" ({recording.censored})" if recording.censored else "")
    return LengthsSection(family="trace", path=path), source


def tuning_scenario(config: Config, scenario: Scenario, lengths: LengthsSection) -> Scenario:
    """The scenario with the run's schedule, response budget, slots and cache behaviour, short enough for the start of a
    run."""
    schedule = config.schedule.model_copy(update={config.schedule.automatic_key: None})
    engine = ENGINES.find(config.worker.engine)
    engines = config.worker.count * len(engine.weight_channels(config, "worker"))
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
