"""The keys of `[schedule]` and `[sampling]`: which samples are generated when, and from which distribution."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, WrapValidator

from april.config.section import AUTO, CONTEXT_TOKENS, Section
from april.wire.limits import MAX_TOP_K

MOST_STEPS = 10**9
"""Largest value of a run's number of batches."""


def or_auto(value: Any, validate: Callable[[Any], int | None]) -> Any:
    return AUTO if value == AUTO else validate(value)


Automatic = Annotated[
    Annotated[int, Field(ge=1)] | None, WrapValidator(or_auto), PlainSerializer(lambda value: value, return_type=Any)
]
"""A count of at least 1, or `AUTO`, which `april.simulate.tune` replaces by a count when a run starts."""


class ScheduleSection(Section):
    kind: str = Field(
        "april",
        description="Schedule of generation and training: sync (wait for every response), april (stop a round at N "
        "groups, resume the rest later), continuous (never stop), or yours as package.module:Class. In this order "
        "they idle less and train older tokens.",
    )
    rollout_batch_size: int = Field(
        32,
        ge=1,
        description="N: prompt groups in a batch. A larger batch takes longer to generate, and training has fewer "
        "steps.",
    )
    over_sampling_batch_size: Automatic = Field(
        None,
        description="N': groups opened in a round or, below rollout_batch_size, at a time. At most (max_staleness + "
        "1) * rollout_batch_size. A larger N' idles less and trains older tokens. Unset: rollout_batch_size; auto: "
        "chosen from response lengths.",
    )
    n_samples_per_prompt: int = Field(
        8,
        ge=1,
        description="n: samples in a group. Generation and training time grow with it; a small group gives noisier "
        "advantages.",
    )
    partial_rollout: bool = Field(
        True,
        description="Resume responses that a round's end interrupted; false: discard every group that the batch left "
        "unfinished.",
    )
    overlap: bool = Field(
        False,
        description="Start the next round while the learner trains: one more step of staleness for less idle time.",
    )
    max_staleness: int = Field(
        5,
        ge=0,
        description="S: largest age of a trained token (policy steps). A high value admits older tokens; a low one "
        "makes workers wait, and limits over_sampling_batch_size and in_flight.",
    )
    max_steps: int = Field(100, ge=1, le=MOST_STEPS, description="Batches to train, after which the run ends.")
    last_batch: Literal["train", "drop"] = Field(
        "train",
        description="Use of the last batch if prompts run out before it is full: train makes a smaller step, drop "
        "discards it.",
    )
    min_group_size: int | None = Field(
        None,
        ge=1,
        description="Samples that a group may shrink to when some fail for good, before the group is discarded. "
        "Smaller groups give noisier advantages. Unset: n_samples_per_prompt.",
    )

    dynamic_sampling: bool = Field(
        False,
        description="Discard groups whose responses are all right or all wrong, and generate others for the batch. "
        "Each discarded group costs its generation.",
    )
    group_filter: str = Field(
        "",
        description="Filter that gives a reason to discard a complete group, which is then replaced: zero_spread, or "
        "yours as package.module:function. Each discarded group costs its generation; the run fails after 20 rounds' "
        "worth of discarded groups in a row. Empty: none.",
    )
    sampler: str = Field(
        "order",
        description="Rule for the prompt that is drawn next: order (each once an epoch, in a seeded order), "
        "difficulty (prompts that are solved half of the time more often), spread (prompts whose rewards differ most "
        "within a group more often), or yours as package.module:function.",
    )
    sampler_floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Least weight that schedule.sampler gives a prompt; one that was never drawn has weight 1. A high "
        "value draws prompts more evenly; a low one rarely draws again what was always solved, or never.",
    )
    in_flight: Automatic = Field(
        None,
        description="C: samples that schedule.kind = 'continuous' keeps in generation, at most (max_staleness + 1) "
        "batches. More fill more decode slots and train older tokens. Unset: over_sampling_batch_size * "
        "n_samples_per_prompt; auto: chosen from response lengths.",
    )
    migrate: bool = Field(
        False,
        description="Move a straggling sample to a worker with free slots if it is expected to finish sooner there, "
        "its prefill included. Equal workers gain next to nothing.",
    )
    scenario: Path | None = Field(
        None,
        description="Scenario file, as for `april tune`, with the costs and response lengths by which a key set to "
        "auto gets its value. Unset: a plain cost model.",
    )

    @property
    def automatic_key(self) -> str:
        """The key whose value is still `AUTO`; empty if there is none."""
        return next((key for key in ("over_sampling_batch_size", "in_flight") if getattr(self, key) == AUTO), "")

    @property
    def groups_per_round(self) -> int:
        """N': groups opened in a round (`over_sampling_batch_size`); if not given, N, the groups of a batch
        (`rollout_batch_size`)."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def over_sampled(self) -> int:
        """Groups opened in a round with over-sampling, for comparisons of the schedule with and without it: N'
        (`groups_per_round`) if it is above N (`rollout_batch_size`), otherwise 2 N."""
        per_round = self.groups_per_round
        return per_round if per_round > self.rollout_batch_size else 2 * self.rollout_batch_size

    @property
    def most_in_flight(self) -> int:
        """C: most training samples in generation at a time (`in_flight`); if not given, all samples of a round."""
        return self.in_flight or self.groups_per_round * self.n_samples_per_prompt

    @property
    def batches_in_reach(self) -> int:
        """Number of batches, from the next one on, that a new group may join under the staleness bound S
        (`max_staleness`): S + 1, or S with `overlap`, which opens groups a step early."""
        return self.max_staleness + (0 if self.overlap else 1)

    @property
    def filters_groups(self) -> bool:
        """Whether complete groups can be discarded by their content."""
        return self.dynamic_sampling or bool(self.group_filter)


class SamplingSection(Section):
    max_response_tokens: int = Field(
        512,
        ge=1,
        le=CONTEXT_TOKENS,
        description="Longest response, over all its segments and turns (tokens). The longest response sets the pace "
        "of a batch and the KV cache of a slot; a low value truncates responses.",
    )
    temperature: float = Field(
        1.0,
        ge=0.01,
        description="Softmax temperature of training samples, at which the learner computes log-probabilities too. A "
        "high value samples less likely tokens, and explores more.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=MAX_TOP_K,
        description="Sample among this many likeliest tokens; 0: all. Above 0 needs the SGLang engine, and each "
        "token carries the ids that were kept: 12 bytes and 4 for each id instead of 8.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample among the likeliest tokens that reach this probability mass; 1: all. Below 1 needs a "
        "top_k, and costs as it does.",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Sample among tokens at least this probable relative to the likeliest; 0: all. Above 0 needs a "
        "top_k, and costs as it does.",
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="Token ids that end a response, in addition to the tokeniser's end of text."
    )

    @property
    def is_cut(self) -> bool:
        """Whether training samples come from a truncated distribution; each token then carries its support (the
        ids that it was drawn from)."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
