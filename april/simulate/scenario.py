"""What is simulated: the schedule of a run, the lengths, the engines, the learner and the weights; a TOML file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from april.broker.plan import throughput_cap
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Schedule
from april.config import ConfigError, ScheduleSection
from april.config.checks import check_schedule
from april.config.costs import EngineCost, read_tables, take_cost
from april.config.loading import sentence
from april.config.overrides import set_key
from april.config.section import Section
from april.simulate.lengths import Lengths, LengthsSection

LENGTHS_LOOKED_AT = 20_000
"""responses whose mean and maximum stand for a family's"""


class EnginesSection(Section):
    count: int = Field(4, ge=1, description="engines")
    slots: int = Field(512, ge=1, description="sequences that one decodes together")
    speed_spread: float = Field(0.0, ge=0, lt=1, description="slowest engine's time over the mean's, less 1")
    prefix_cache: bool = Field(True, description="what was handed back stays in its cache until new weights come")
    latency_s: float = Field(0.005, ge=0, description="from a freed slot to the next sample's arrival (seconds)")
    failure_every_s: float | None = Field(None, gt=0, description="mean time between failures of one; none: never")
    restart_s: float = Field(60.0, gt=0, description="an engine that failed is away for this long (seconds)")
    chunk_tokens: int = Field(512, ge=1, description="a failure costs what came after the last so many (tokens)")

    @property
    def slowdowns(self) -> list[float]:
        """Each engine's time over the mean's."""
        return (1 + self.speed_spread * np.linspace(-1, 1, self.count)).tolist() if self.count > 1 else [1.0]


class LearnerCost(Section):
    step_s: float = Field(0.0, ge=0, description="of a training step, whatever its batch (seconds)")
    token_s: float = Field(0.0, ge=0, description="more for each response token of the batch (seconds)")


class WeightsCost(Section):
    transfer_s: float = Field(0.0, ge=0, description="from the end of a step to the engines, beside generation (s)")
    pause_s: float = Field(0.0, ge=0, description="engines stand still while they take weights in (seconds)")
    keep_kv: bool = Field(True, description="running sequences keep their cache over an update; otherwise recomputed")


class Scenario(Section):
    seed: int = Field(0, ge=0, description="of lengths, speeds and failures")
    steps: int = Field(100, ge=1, description="batches that are measured")
    warmup_steps: int | None = Field(None, ge=0, description="batches before them; none: 3 x (S + 1)")
    ends: bool = Field(False, description="as a run does: nothing is begun that no batch needs; otherwise it goes on")
    limit_responses: int = Field(24_000, ge=1, description="that end while the no-barrier limit is measured")
    schedule: ScheduleSection = ScheduleSection()
    lengths: LengthsSection = LengthsSection()
    engines: EnginesSection = EnginesSection()
    learner: LearnerCost = LearnerCost()
    weights: WeightsCost = WeightsCost()
    cost: EngineCost

    @property
    def first_measured(self) -> int:
        return 3 * (self.schedule.max_staleness + 1) if self.warmup_steps is None else self.warmup_steps

    @property
    def kind(self) -> type[Schedule]:
        return SCHEDULES.find(self.schedule.kind)

    @property
    def slots_wanted(self) -> int:
        """Slots that the schedule would fill if nothing held it back."""
        return min(self.kind.samples_in_flight(self.schedule), self.engines.count * self.engines.slots)

    def make_lengths(self) -> Lengths:
        return Lengths(self.lengths, self.schedule.n_samples_per_prompt, self.seed)

    def with_keys(self, **changes) -> "Scenario":
        """Another scenario with some keys changed; `section__key` names a key of a section."""
        tree = self.model_dump(exclude_none=True)
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            branch = tree[section] if section else tree
            if value is None:
                branch.pop(name, None)
            else:
                branch[name] = value
        return check_scenario(Scenario.model_validate(tree))

    def cap(self, lengths: Lengths) -> float:
        """Share of the no-barrier limit that the staleness bound, or the round's barrier, leaves."""
        drawn = lengths.sample(max(64, LENGTHS_LOOKED_AT // lengths.group_size))
        (batches, groups), n = self.kind.in_reach(self.schedule), self.schedule.n_samples_per_prompt
        return throughput_cap(batches, groups, n, self.slots_wanted, float(drawn.mean()), float(drawn.max()))


def check_scenario(scenario: Scenario) -> Scenario:
    check_schedule(scenario.schedule)
    longest = scenario.make_lengths().longest_context
    if longest > scenario.cost.kv_tokens:
        raise ConfigError(
            f"key 'cost.kv_tokens' = {scenario.cost.kv_tokens} is less than the longest response with its prompt, "
            f"{longest} tokens; raise it, or lower lengths.longest_tokens"
        )
    return scenario


def load_scenario(path: Path, overrides: Sequence[tuple[str, object]] = (), cost: str | None = None) -> Scenario:
    """Read a scenario. `cost` names a cost model of its own [costs.NAME] or of April's; see `take_cost`."""
    tree = read_tables(Path(path), "scenario")
    tree["cost"] = take_cost(tree, Path(path), cost)
    for key, value in overrides:
        set_key(tree, key, value)
    try:
        return check_scenario(Scenario.model_validate(tree))
    except ValidationError as error:
        found = sentence(error.errors()[0], Scenario, "april/simulate/scenario.py")
        raise ConfigError(f"scenario {path}: {found}") from None
