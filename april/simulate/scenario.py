"""A scenario: the TOML file that describes a simulated run (schedule, lengths, engines, learner and weights)."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from april.broker.plan import throughput_cap
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Schedule
from april.config import ConfigError, ScheduleSection
from april.config.checks import check_schedule
from april.config.costs import EngineCost, pop_cost_model, read_toml
from april.config.loading import error_sentence, known_keys, set_key
from april.config.section import Section, with_own_keys
from april.simulate.trace import read_trace
from april.util.errors import refuse

# --- lengths ----------------------------------------------------------------------------------------------------------

BLOCK_GROUPS = 1024
"""Number of groups whose lengths are drawn at once."""
BLOCKS_KEPT = 128


class LengthsSection(Section):
    family: Literal["lognormal", "pareto", "bimodal", "equal", "trace"] = Field(
        "lognormal", description="Distribution of response lengths."
    )
    median_tokens: float = Field(
        4500, gt=0, description="For lognormal: median over prompts; equal: every response (tokens)."
    )
    sigma_between: float = Field(
        0.6, ge=0, description="For lognormal: standard deviation of the log length between prompts."
    )
    sigma_within: float = Field(
        0.35, ge=0, description="For lognormal: standard deviation of the log length within a group."
    )
    smallest_tokens: float = Field(100, gt=0, description="For pareto: shortest response (tokens).")
    alpha: float = Field(1.5, gt=0, description="For pareto: P(length > x) = (smallest / x) ** alpha.")
    short_tokens: int = Field(100, ge=1, description="For bimodal: length of most responses (tokens).")
    long_tokens: int = Field(50_000, ge=1, description="For bimodal: length of the other responses (tokens).")
    long_share: float = Field(0.01, ge=0, le=1, description="For bimodal: share of the long responses.")
    longest_tokens: int = Field(16_384, ge=1, description="Response budget; longer responses are cut off (tokens).")
    prompt_tokens: int = Field(200, ge=0, description="Prompt length; a trace has its own (tokens).")
    path: Path | None = Field(None, description="For trace: JSONL file written by `april trace`.")
    in_order: bool = Field(
        False, description="For trace: replay its groups in order, again and again, instead of drawing them."
    )


class Lengths:
    """Prompt and response lengths of each group by its index, the same for every schedule.

    Group g gets the g-th draw of a stream fixed by the seed. Raises ConfigError.
    """

    def __init__(self, section: LengthsSection, group_size: int, seed: int):
        self.section, self.group_size, self.seed = section, group_size, seed
        if section.in_order and section.family != "trace":
            refuse(
                "lengths.in_order",
                True,
                f"says nothing: lengths.family = {section.family!r} is drawn",
                "leave it out, or use a trace",
            )
        if (section.family == "trace") != (section.path is not None):
            refuse(
                "lengths.path",
                section.path,
                f"does not fit lengths.family = {section.family!r}",
                "a trace, and only a trace, has a path",
            )
        self.trace = read_trace(section.path) if section.path else []
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._draw_block)

    def of(self, group: int) -> list[int]:
        """Response lengths of the group's samples (tokens)."""
        return self._block(group // BLOCK_GROUPS)[1][group % BLOCK_GROUPS].tolist()

    def prompt_of(self, group: int) -> int:
        """Length of the group's prompt (tokens)."""
        return int(self._block(group // BLOCK_GROUPS)[0][group % BLOCK_GROUPS])

    def at(self, group: int, index: int) -> tuple[int, int]:
        """(prompt length, response length) of one sample (tokens)."""
        prompts, responses = self._block(group // BLOCK_GROUPS)
        row = group % BLOCK_GROUPS
        return prompts.item(row), responses.item(row, index)

    @property
    def longest_context(self) -> int:
        """Largest sum of the lengths of a prompt and its response, over all lengths that can be drawn (tokens)."""
        section = self.section
        if self.trace:
            return max(
                group.prompt_tokens + min(max(group.response_tokens), section.longest_tokens) for group in self.trace
            )
        return section.prompt_tokens + section.longest_tokens

    def sample(self, groups: int) -> np.ndarray:
        """Response lengths of the groups 0 to `groups` - 1, int [groups, samples per group]."""
        return np.array([self.of(group) for group in range(groups)])

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt lengths, int32 [BLOCK_GROUPS], and response lengths, int32 [BLOCK_GROUPS, samples per group], of the
        groups in block number `block` (tokens)."""
        rng = np.random.default_rng([self.seed, block])
        section, shape = self.section, (BLOCK_GROUPS, self.group_size)
        prompts = np.full(BLOCK_GROUPS, section.prompt_tokens, np.int32)
        if section.family == "lognormal":
            between = section.sigma_between * rng.standard_normal((BLOCK_GROUPS, 1))
            drawn = section.median_tokens * np.exp(between + section.sigma_within * rng.standard_normal(shape))
        elif section.family == "pareto":
            drawn = section.smallest_tokens * (1 - rng.random(shape)) ** (-1 / section.alpha)
        elif section.family == "bimodal":
            drawn = np.where(rng.random(shape) < section.long_share, section.long_tokens, section.short_tokens)
        elif section.family == "equal":
            drawn = np.full(shape, section.median_tokens)
        else:
            indices = rng.integers(0, len(self.trace), BLOCK_GROUPS)
            if section.in_order:
                indices = np.arange(block * BLOCK_GROUPS, (block + 1) * BLOCK_GROUPS) % len(self.trace)
            chosen = [self.trace[index] for index in indices]
            prompts = np.array([group.prompt_tokens for group in chosen], np.int32)
            drawn = np.array([self._draw_traced(group.response_tokens, rng) for group in chosen])
        return prompts, np.clip(np.rint(drawn), 1, section.longest_tokens).astype(np.int32)

    def _draw_traced(self, lengths: list[int], rng: np.random.Generator) -> np.ndarray:
        """As many of a traced group's `lengths` as a group has samples, drawn without replacement if possible."""
        if self.section.in_order and len(lengths) == self.group_size:
            return np.array(lengths)
        return rng.choice(lengths, self.group_size, replace=len(lengths) < self.group_size)


# --- scenario ---------------------------------------------------------------------------------------------------------

LENGTHS_LOOKED_AT = 20_000
"""Number of responses drawn to estimate the mean and maximum of a length distribution."""


class EnginesSection(Section):
    count: int = Field(4, ge=1, description="Number of engines.")
    slots: int = Field(512, ge=1, description="Sequences that an engine decodes at once.")
    speed_spread: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Relative slowdown of the slowest engine; speeds are spread evenly around the mean.",
    )
    prefix_cache: bool = Field(
        True, description="Keep the KV prefix of a returned sample until new weights are loaded."
    )
    prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="Most context tokens that an engine admits before its next decode step, or one sample; none: no "
        "limit.",
    )
    latency_s: float = Field(0.005, ge=0, description="Time from a freed slot to the next sample's arrival (seconds).")
    failure_every_s: float | None = Field(
        None, gt=0, description="Mean time between failures of an engine; none: never (seconds)."
    )
    restart_s: float = Field(60.0, gt=0, description="Time until a failed engine is back (seconds).")
    chunk_tokens: int = Field(
        512, ge=1, description="Chunk size; a failed engine loses each sample's incomplete chunk (tokens)."
    )

    @property
    def slowdowns(self) -> list[float]:
        """For each engine the factor by which its decode steps take longer than in the cost model; the mean is 1."""
        return (1 + self.speed_spread * np.linspace(-1, 1, self.count)).tolist() if self.count > 1 else [1.0]


class LearnerCost(Section):
    step_s: float = Field(0.0, ge=0, description="Fixed time of a training step (seconds).")
    token_s: float = Field(0.0, ge=0, description="Additional time per response token of the batch (seconds).")


class WeightsCost(Section):
    transfer_s: float = Field(
        0.0,
        ge=0,
        description="Time from the end of a step to weights at the engines, which generate meanwhile (seconds).",
    )
    pause_s: float = Field(0.0, ge=0, description="Time for which an engine pauses to load weights (seconds).")
    keep_kv: bool = Field(
        True, description="Running sequences keep their KV cache over a weight update; otherwise it is recomputed."
    )


class Scenario(Section):
    seed: int = Field(0, ge=0, description="Random seed of lengths and failures.")
    steps: int = Field(100, ge=1, description="Training steps that are measured.")
    warmup_steps: int | None = Field(
        None, ge=0, description="Training steps before the measured ones; none: 3 x (max_staleness + 1)."
    )
    ends: bool = Field(
        False,
        description="Start no group that the last batch does not need, as a run does; otherwise never stop generating.",
    )
    limit_responses: int = Field(
        24_000, ge=1, description="Responses completed while the no-barrier limit is measured."
    )
    schedule: ScheduleSection = ScheduleSection()
    lengths: LengthsSection = LengthsSection()
    engines: EnginesSection = EnginesSection()
    learner: LearnerCost = LearnerCost()
    weights: WeightsCost = WeightsCost()
    cost: EngineCost

    @property
    def first_measured(self) -> int:
        """Number of the first training step that is measured, counted from 0; the steps before it are the warm-up."""
        return 3 * (self.schedule.max_staleness + 1) if self.warmup_steps is None else self.warmup_steps

    @property
    def kind(self) -> type[Schedule]:
        return SCHEDULES.find(self.schedule.kind)

    @property
    def slots_wanted(self) -> int:
        """Number of slots, over all engines, that the schedule keeps filled when nothing delays it."""
        return min(self.kind.samples_in_flight(self.schedule), self.engines.count * self.engines.slots)

    def make_lengths(self) -> Lengths:
        return Lengths(self.lengths, self.schedule.n_samples_per_prompt, self.seed)

    def with_keys(self, **changes) -> "Scenario":
        """A copy in which the keys `changes` have other values, checked as a scenario file is. `section__key` names a
        key of a section; a value of None removes the key."""
        tree = self.model_dump(exclude_none=True, serialize_as_any=True)
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            table = tree[section] if section else tree
            if value is None:
                table.pop(name, None)
            else:
                table[name] = value
        model = with_own_keys(Scenario, tree)
        known = known_keys(model).keys() | {key.replace("__", ".") for key in changes}
        tree["schedule"] = {key: value for key, value in tree["schedule"].items() if f"schedule.{key}" in known}
        return check_scenario(model.model_validate(tree))

    def cap(self, lengths: Lengths) -> float:
        """Upper bound on the trained tokens per second, as a share, from 0 to 1, of the no-barrier limit (what the
        engines generate if no sample ever waits for another). It follows from the staleness bound or, in a schedule
        with rounds, from the wait for the round's last groups."""
        drawn = lengths.sample(max(64, LENGTHS_LOOKED_AT // lengths.group_size))
        (batches, groups), n = self.kind.in_reach(self.schedule), self.schedule.n_samples_per_prompt
        return throughput_cap(batches, groups, n, self.slots_wanted, float(drawn.mean()), float(drawn.max()))


def check_scenario(scenario: Scenario) -> Scenario:
    """Check a scenario, and return it. Raises ConfigError unless its schedule is valid and its longest prompt and
    response fit the KV cache together."""
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
    """Read a scenario file. `overrides`: (key, value) that replace its own. `cost`: name of a cost model in its
    [costs.NAME] or shipped with April; None: its [cost] or first [costs.NAME], or else April's first. Raises
    ConfigError."""
    tree = read_toml(Path(path), "scenario")
    tree["cost"] = pop_cost_model(tree, Path(path), cost)
    for key, value in overrides:
        set_key(tree, key, value)
    model = with_own_keys(Scenario, tree)
    try:
        return check_scenario(model.model_validate(tree))
    except ValidationError as error:
        found = error_sentence(error.errors()[0], model, "april/simulate/scenario.py")
        raise ConfigError(f"scenario {path}: {found}") from None
