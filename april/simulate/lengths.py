"""Prompt and response lengths of simulated groups, from a named distribution or a trace; the same for every
schedule."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from april.config.section import Section
from april.errors import refuse
from april.simulate.trace import read_trace

BLOCK_GROUPS = 1024
"""Groups whose lengths are drawn at once."""
BLOCKS_KEPT = 128


class LengthsSection(Section):
    family: Literal["lognormal", "pareto", "bimodal", "equal", "trace"] = Field(
        "lognormal", description="distribution of response lengths"
    )
    median_tokens: float = Field(
        4500, gt=0, description="lognormal: median over prompts; equal: every response (tokens)"
    )
    sigma_between: float = Field(
        0.6, ge=0, description="lognormal: standard deviation of the log length between prompts"
    )
    sigma_within: float = Field(
        0.35, ge=0, description="lognormal: standard deviation of the log length within a group"
    )
    smallest_tokens: float = Field(100, gt=0, description="pareto: shortest response (tokens)")
    alpha: float = Field(1.5, gt=0, description="pareto: P(length > x) = (smallest / x) ** alpha")
    short_tokens: int = Field(100, ge=1, description="bimodal: length of most responses (tokens)")
    long_tokens: int = Field(50_000, ge=1, description="bimodal: length of the other responses (tokens)")
    long_share: float = Field(0.01, ge=0, le=1, description="bimodal: share of the long responses")
    longest_tokens: int = Field(16_384, ge=1, description="response budget; longer responses are cut off (tokens)")
    prompt_tokens: int = Field(200, ge=0, description="prompt length; a trace has its own (tokens)")
    path: Path | None = Field(None, description="trace: JSONL file written by `april trace`")
    in_order: bool = Field(
        False, description="trace: replay its groups in order, again and again, instead of drawing them"
    )


class Lengths:
    """Lengths of each group by its index; group g gets the g-th draw of a stream fixed by the seed. Raises
    ConfigError."""

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
        """Most tokens of a prompt and its response together."""
        section = self.section
        if self.trace:
            return max(
                group.prompt_tokens + min(max(group.response_tokens), section.longest_tokens) for group in self.trace
            )
        return section.prompt_tokens + section.longest_tokens

    def sample(self, groups: int) -> np.ndarray:
        """int [groups, n]: response lengths of the first groups."""
        return np.array([self.of(group) for group in range(groups)])

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 prompt lengths [BLOCK_GROUPS] and response lengths [BLOCK_GROUPS, n] of one block."""
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
        """n lengths drawn from a traced group, without replacement if it has at least n."""
        if self.section.in_order and len(lengths) == self.group_size:
            return np.array(lengths)
        return rng.choice(lengths, self.group_size, replace=len(lengths) < self.group_size)
