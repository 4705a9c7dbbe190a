"""What `auto` stands for in a run's schedule: `april tune`'s answer when the run starts, from the lengths seen so far.

The lengths are those in the run's own journal when it is resumed, otherwise those of `schedule.scenario`; with neither,
twice the batch is started, as in the published setting. The choice is written into the run's config.toml, so that a
broker that comes back goes on with it; only `april run --resume` chooses again.
"""

import tomllib
from pathlib import Path

from april.broker.schedules import SCHEDULES
from april.config import Config, ConfigError
from april.config.checks import check_schedule
from april.config.costs import EngineCost
from april.simulate.lengths import LengthsSection
from april.simulate.recording import record_trace
from april.simulate.scenario import Scenario, check_scenario, load_scenario
from april.simulate.trace import write_trace
from april.simulate.tune import tune
from april.workers.engines import ENGINES

DEFAULT_FACTOR = 2
"""batches started at a time where no length is known"""
PLAIN_COST = EngineCost(
    source="10 ms + 0.06 ms for each request", decode_base_s=0.01, decode_running_s=6e-5, decode_kv_s=0, prefill_s=2e-5
)
"""of engines of which nothing is known"""
TUNED_RESPONSES = 4096
"""about so many are measured for each value that is tried, behind a warm-up of S + 1 batches"""
LEAST_STEPS = 4
TRACE = "lengths.jsonl"
"""in the run folder: the lengths that the choice was made from"""


def resolve(config: Config, resumed: bool = False, folder: Path | None = None) -> tuple[Config, str]:
    """The configuration with a number in place of `auto`, and why that one; unchanged and "" if nothing is `auto`.

    `resumed`: the run's folder has lengths, which are left in `folder` [default the run's]. Raises ConfigError.
    """
    key = config.schedule.automatic_key
    return decide(config, key, *choose(config, key, resumed, folder or config.run_dir)) if key else (config, "")


def resolve_as_recorded(config: Config) -> tuple[Config, str]:
    """The same with what the run's folder says, if the run has begun."""
    key, path = config.schedule.automatic_key, config.run_dir / "config.toml"
    before = tomllib.loads(path.read_text()).get("schedule", {}) if key and path.exists() else {}
    if isinstance(before.get(key), int):
        return decide(config, key, before[key], "chosen when the run was started")
    return resolve(config, resumed=True)


def decide(config: Config, key: str, value: int, why: str) -> tuple[Config, str]:
    schedule = config.schedule.model_copy(update={key: value})
    check_schedule(schedule)
    return config.model_copy(update={"schedule": schedule}), f"schedule.{key} = {value}: {why}"


def choose(config: Config, key: str, resumed: bool, folder: Path) -> tuple[int, str]:
    """(value, why)"""
    schedule = config.schedule
    if schedule.scenario and not schedule.scenario.is_file():
        raise ConfigError(
            f"key 'schedule.scenario' = {str(schedule.scenario)!r} does not exist; give a file such as "
            "configs/published.toml, or leave it out"
        )
    scenario = load_scenario(schedule.scenario) if schedule.scenario else None
    lengths, whose = scenario.lengths if scenario else None, f"of {schedule.scenario}"
    if resumed and (seen := seen_lengths(config, folder)):
        lengths, whose = seen
    if lengths is None:
        batches = min(DEFAULT_FACTOR, schedule.batches_in_reach)
        value = batches * SCHEDULES.find(schedule.kind).dial.of_one_batch(schedule)
        return value, f"{batches} times the batch, since too few lengths are known; schedule.scenario can name some"
    choice = tune(planned(config, scenario or Scenario(cost=PLAIN_COST), lengths))
    return choice.value, f"by the lengths {whose}, {choice.why}"


def seen_lengths(config: Config, folder: Path) -> tuple[LengthsSection, str] | None:
    """Those that `record_trace` finds, and whose they are; None if they are of fewer groups than can be waiting for a
    straggler."""
    try:
        recording = record_trace(config.run_dir)
    except ConfigError:
        return None
    if len(recording.groups) < config.schedule.batches_in_reach * config.schedule.rollout_batch_size:
        return None
    path = folder / TRACE
    write_trace(path, recording.groups)
    whose = "of the run so far" + (f" ({recording.censored})" if recording.censored else "")
    return LengthsSection(family="trace", path=path), whose


def planned(config: Config, scenario: Scenario, lengths: LengthsSection) -> Scenario:
    """The scenario with the run's own schedule, budget and slots, what its engines keep in their caches, and no longer
    than the start of a run may take."""
    schedule = config.schedule.model_copy(update={config.schedule.automatic_key: None})
    engine = ENGINES.find(config.worker.engine)
    engines = config.worker.count * len(engine.lanes(config, "worker"))
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
