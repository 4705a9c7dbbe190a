"""Next tokens from logits, as a pure function of (seed, position, distribution).

Each token is drawn by inverse CDF from one uniform number, a hash of the sample's seed and the token's position. So a
sample is the same in any batch, and wherever it was interrupted.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LARGE_VOCABULARY, BLOCK = 2048, 128
"""Number of vocabulary entries from which on `draw` searches the vocabulary block by block, and number of entries in a
block."""


def mix(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014): uint64 to uint64, every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_of(seed: int) -> np.uint64:
    """Start state of a seed's SplitMix64 stream; nearby seeds start far apart."""
    return mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + GOLDEN)[0]


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers, float64 [n] in [0, 1): those at `positions` (int64 [n]) of SplitMix64 `streams` (uint64 [n])."""
    return (mix(streams + positions.astype(np.uint64) * GOLDEN) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling parameters of a batch of n rows; a field is None if no row needs it."""

    temperature: Tensor | None
    """float32 [n, 1]; 1 for greedy rows."""
    greedy: Tensor | None
    """bool [n]: rows that take the likeliest token."""
    cut_rows: Tensor | None
    """int64 [m]: indices of the rows with top-k or top-p."""
    top_k: Tensor | None
    """int64 [m, 1]: top-k of each row in `cut_rows`."""
    top_p: Tensor | None
    """float64 [m, 1]: top-p of each row in `cut_rows`."""

    @staticmethod
    def of(temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, vocabulary: int, device: torch.device):
        """A plan from each row's parameters, float64, int64 and float64 [n].

        Temperature 0 is greedy; top_k 0 and top_p 1 keep every token.
        """

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        greedy = temperature == 0
        effective = np.where(greedy, 1.0, temperature)
        cut = np.flatnonzero(((top_k > 0) & (top_k < vocabulary) | (top_p < 1)) & ~greedy)
        kept = np.where(top_k > 0, top_k, vocabulary)
        return SamplingPlan(
            temperature=tensor(effective.astype(np.float32)[:, None]) if (effective != 1).any() else None,
            greedy=tensor(greedy) if greedy.any() else None,
            cut_rows=tensor(cut) if len(cut) else None,
            top_k=tensor(kept[cut, None]) if len(cut) else None,
            top_p=tensor(top_p[cut, None]) if len(cut) else None,
        )


def sample(logits: Tensor, uniform: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """Sampled tokens, int64 [n], and their behaviour log-probabilities, float32 [n], over the full vocabulary.

    `logits`: float32 [n, vocabulary]. `uniform`: float64 [n] in [0, 1).
    """
    if plan.temperature is not None:
        logits = logits / plan.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    weights = logprobs.exp()
    if plan.cut_rows is not None:
        weights[plan.cut_rows] = cut(weights[plan.cut_rows], plan.top_k, plan.top_p)
    tokens = draw(weights, uniform.unsqueeze(1)).clamp_(max=logits.shape[-1] - 1)  # also of rows that are not finite
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy.unsqueeze(1), logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def sample_support(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled token, its log-probability over its support, and the support's ids, int64 [S], ascending.

    `logits`: float32 [vocabulary]. `uniform`: float64, in [0, 1). Temperature 0 is greedy. Top-k comes first, then
    top-p, then min-p.
    """
    weights = (logits / (temperature or 1.0)).softmax(-1)
    (weights,) = cut(weights[None], torch.tensor(top_k or len(weights)), torch.tensor(top_p))
    weights = weights.masked_fill(weights < min_p * weights.max(), 0)
    drawn = draw(weights[None], uniform.view(1, 1)).view(()).clamp_(max=len(weights) - 1)  # also if none is finite
    token = drawn if temperature else logits.argmax()
    return token, (weights[token] / weights.sum()).log(), weights.nonzero()[:, 0]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token of each row whose share of the weights holds its uniform number: int64 [n, 1].

    `weights`: float32 [n, vocabulary]; `uniform`: float64 [n, 1]. A large vocabulary is searched in two levels, which
    spares the running sums over all of it.
    """
    vocabulary = weights.shape[-1]
    if vocabulary < LARGE_VOCABULARY:
        # In float64 uniform * total < total, so the first sum above it belongs to a token of positive weight.
        sums = weights.cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    if missing := -vocabulary % BLOCK:
        weights = F.pad(weights, (0, missing))
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    sums = inside.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(sums, target - before, right=True)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())  # of positive weight; sums of sums are rounded otherwise
    return block * BLOCK + torch.minimum(found, last)


def cut(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the weights outside top-k, then outside top-p of the rest, to zero; `weights`: float [m, vocabulary].

    Top-p keeps the smallest set of likeliest tokens whose share of the mass reaches top_p.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.double().masked_fill(ranks >= top_k, 0)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < top_p * ordered.sum(dim=-1, keepdim=True)) & (ranks < top_k)
    return weights * torch.zeros_like(kept).scatter(1, order, kept)
