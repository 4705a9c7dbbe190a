"""Response lengths of the groups of a run: a named family, or a trace. The same group always has the same lengths."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from april.config import ConfigError
from april.config.section import Section
from april.simulate.trace import read_trace

BLOCK_GROUPS = 1024
"""groups whose lengths are drawn together"""
BLOCKS_KEPT = 128


class LengthsSection(Section):
    family: Literal["lognormal", "pareto", "bimodal", "equal", "trace"] = Field(
        "lognormal", description="distribution of response lengths"
    )
    median_tokens: float = Field(
        4500, gt=0, description="lognormal: median over prompts; equal: every response (tokens)"
    )
    sigma_between: float = Field(0.6, ge=0, description="lognormal: of the logarithm, between prompts")
    sigma_within: float = Field(0.35, ge=0, description="lognormal: of the logarithm, within a group")
    smallest_tokens: float = Field(100, gt=0, description="pareto: shortest response (tokens)")
    alpha: float = Field(1.5, gt=0, description="pareto: P(length > x) = (smallest / x) ** alpha")
    short_tokens: int = Field(100, ge=1, description="bimodal: most responses (tokens)")
    long_tokens: int = Field(50_000, ge=1, description="bimodal: the others (tokens)")
    long_share: float = Field(0.01, ge=0, le=1, description="bimodal: share of the others")
    longest_tokens: int = Field(16_384, ge=1, description="every response is cut here (tokens)")
    prompt_tokens: int = Field(200, ge=0, description="of every prompt; a trace has its own (tokens)")
    path: Path | None = Field(None, description="trace: JSONL of `april trace`")
    in_order: bool = Field(
        False, description="trace: its groups one after the other, from the first again behind the last; not drawn"
    )


class Lengths:
    """int lengths of group g, the same whatever the schedule: the g-th of a stream that the seed fixes."""

    def __init__(self, section: LengthsSection, group_size: int, seed: int):
        self.section, self.group_size, self.seed = section, group_size, seed
        if section.in_order and section.family != "trace":
            raise ConfigError(
                f"key 'lengths.in_order' = True says nothing: lengths.family = {section.family!r} is drawn; leave it "
                "out, or use a trace"
            )
        if (section.family == "trace") != (section.path is not None):
            raise ConfigError(
                f"key 'lengths.path' = {str(section.path)!r} does not fit lengths.family = {section.family!r}; "
                "a trace, and only a trace, has a path"
            )
        self.trace = read_trace(section.path) if section.path else []
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._draw_block)

    def of(self, group: int) -> list[int]:
        """Response lengths of its samples (tokens)."""
        return self._block(group // BLOCK_GROUPS)[1][group % BLOCK_GROUPS].tolist()

    def prompt_of(self, group: int) -> int:
        """Length of its prompt (tokens)."""
        return int(self._block(group // BLOCK_GROUPS)[0][group % BLOCK_GROUPS])

    def at(self, group: int, index: int) -> tuple[int, int]:
        """Lengths of its prompt and of one of its samples (tokens)."""
        prompts, responses = self._block(group // BLOCK_GROUPS)
        place = group % BLOCK_GROUPS
        return prompts.item(place), responses.item(place, index)

    @property
    def longest_context(self) -> int:
        """Of a prompt and its response together (tokens)."""
        section = self.section
        if self.trace:
            return max(
                group.prompt_tokens + min(max(group.response_tokens), section.longest_tokens) for group in self.trace
            )
        return section.prompt_tokens + section.longest_tokens

    def sample(self, groups: int) -> np.ndarray:
        """int [groups, n]: lengths of the first groups."""
        return np.array([self.of(group) for group in range(groups)])

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 lengths of prompts and responses, [BLOCK_GROUPS] and [BLOCK_GROUPS, n]."""
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
            places = rng.integers(0, len(self.trace), BLOCK_GROUPS)
            if section.in_order:
                places = np.arange(block * BLOCK_GROUPS, (block + 1) * BLOCK_GROUPS) % len(self.trace)
            chosen = [self.trace[at] for at in places]
            prompts = np.array([group.prompt_tokens for group in chosen], np.int32)
            drawn = np.array([self._of_traced(group.response_tokens, rng) for group in chosen])
        return prompts, np.clip(np.rint(drawn), 1, section.longest_tokens).astype(np.int32)

    def _of_traced(self, lengths: list[int], rng: np.random.Generator) -> np.ndarray:
        """n lengths of a traced group, none twice unless it has fewer."""
        if self.section.in_order and len(lengths) == self.group_size:
            return np.array(lengths)
        return rng.choice(lengths, self.group_size, replace=len(lengths) < self.group_size)
