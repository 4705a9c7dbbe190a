"""A scenario: the TOML file that describes a simulated run (schedule, lengths, engines, learner and weights)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from april.broker.plan import throughput_cap
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Schedule
from april.config import ConfigError, ScheduleSection
from april.config.checks import check_schedule
from april.config.costs import EngineCost, pop_cost_model, read_toml
from april.config.loading import error_sentence
from april.config.overrides import set_key
from april.config.section import Section
from april.errors import refuse
from april.simulate.lengths import Lengths, LengthsSection

LENGTHS_LOOKED_AT = 20_000
"""Responses drawn to estimate the mean and maximum of a length distribution."""


class EnginesSection(Section):
    count: int = Field(4, ge=1, description="number of engines")
    slots: int = Field(512, ge=1, description="sequences that an engine decodes at once")
    speed_spread: float = Field(
        0.0, ge=0, lt=1, description="relative slowdown of the slowest engine; speeds are spread evenly around the mean"
    )
    prefix_cache: bool = Field(True, description="keep the KV prefix of a returned sample until new weights are loaded")
    latency_s: float = Field(0.005, ge=0, description="time from a freed slot to the next sample's arrival (seconds)")
    failure_every_s: float | None = Field(
        None, gt=0, description="mean time between failures of an engine; none: never (seconds)"
    )
    restart_s: float = Field(60.0, gt=0, description="time until a failed engine is back (seconds)")
    chunk_tokens: int = Field(
        512, ge=1, description="chunk size; a failed engine loses each sample's incomplete chunk (tokens)"
    )

    @property
    def slowdowns(self) -> list[float]:
        """Each engine's decode time relative to the mean."""
        return (1 + self.speed_spread * np.linspace(-1, 1, self.count)).tolist() if self.count > 1 else [1.0]


class LearnerCost(Section):
    step_s: float = Field(0.0, ge=0, description="fixed time of a training step (seconds)")
    token_s: float = Field(0.0, ge=0, description="additional time per response token of the batch (seconds)")


class WeightsCost(Section):
    transfer_s: float = Field(
        0.0,
        ge=0,
        description="time from the end of a step to weights at the engines, which generate meanwhile (seconds)",
    )
    pause_s: float = Field(0.0, ge=0, description="time for which an engine pauses to load weights (seconds)")
    keep_kv: bool = Field(
        True, description="running sequences keep their KV cache over a weight update; otherwise it is recomputed"
    )


class Scenario(Section):
    seed: int = Field(0, ge=0, description="random seed of lengths and failures")
    steps: int = Field(100, ge=1, description="training steps that are measured")
    warmup_steps: int | None = Field(
        None, ge=0, description="training steps before the measured ones; none: 3 x (max_staleness + 1)"
    )
    ends: bool = Field(
        False,
        description="start no group that the last batch does not need, as a run does; otherwise never stop generating",
    )
    limit_responses: int = Field(24_000, ge=1, description="responses completed while the no-barrier limit is measured")
    schedule: ScheduleSection = ScheduleSection()
    lengths: LengthsSection = LengthsSection()
    engines: EnginesSection = EnginesSection()
    learner: LearnerCost = LearnerCost()
    weights: WeightsCost = WeightsCost()
    cost: EngineCost

    @property
    def first_measured(self) -> int:
        """First measured training step."""
        return 3 * (self.schedule.max_staleness + 1) if self.warmup_steps is None else self.warmup_steps

    @property
    def kind(self) -> type[Schedule]:
        return SCHEDULES.find(self.schedule.kind)

    @property
    def slots_wanted(self) -> int:
        """Slots that the schedule keeps filled when nothing delays it."""
        return min(self.kind.samples_in_flight(self.schedule), self.engines.count * self.engines.slots)

    def make_lengths(self) -> Lengths:
        return Lengths(self.lengths, self.schedule.n_samples_per_prompt, self.seed)

    def with_keys(self, **changes) -> "Scenario":
        """A copy with some keys changed, checked; `section__key` names a key of a section, None removes it."""
        tree = self.model_dump(exclude_none=True)
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            table = tree[section] if section else tree
            if value is None:
                table.pop(name, None)
            else:
                table[name] = value
        return check_scenario(Scenario.model_validate(tree))

    def cap(self, lengths: Lengths) -> float:
        """Upper bound on the throughput under the staleness bound or the rounds' barrier, as a share of the no-barrier
        limit."""
        drawn = lengths.sample(max(64, LENGTHS_LOOKED_AT // lengths.group_size))
        (batches, groups), n = self.kind.in_reach(self.schedule), self.schedule.n_samples_per_prompt
        return throughput_cap(batches, groups, n, self.slots_wanted, float(drawn.mean()), float(drawn.max()))


def check_scenario(scenario: Scenario) -> Scenario:
    """The scenario itself. Raises ConfigError unless its schedule is valid and its longest response fits the KV
    cache."""
    check_schedule(scenario.schedule)
    longest = scenario.make_lengths().longest_context
    if longest > scenario.cost.kv_tokens:
        refuse(
            "cost.kv_tokens",
            scenario.cost.kv_tokens,
            f"is less than the longest response with its prompt, {longest} tokens",
            "raise it, or lower lengths.longest_tokens",
        )
    return scenario


def load_scenario(path: Path, overrides: Sequence[tuple[str, object]] = (), cost: str | None = None) -> Scenario:
    """Read a scenario file. `cost`: name of a cost model in its [costs.NAME] or shipped with April, see
    `pop_cost_model`. Raises ConfigError."""
    tree = read_toml(Path(path), "scenario")
    tree["cost"] = pop_cost_model(tree, Path(path), cost)
    for key, value in overrides:
        set_key(tree, key, value)
    try:
        return check_scenario(Scenario.model_validate(tree))
    except ValidationError as error:
        found = error_sentence(error.errors()[0], Scenario, "april/simulate/scenario.py")
        raise ConfigError(f"scenario {path}: {found}") from None
