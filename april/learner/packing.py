"""Assignment of samples to micro-batches and ranks, packing of samples without padding, and division into minibatches.

`plan` is a pure function of lengths and costs, so every rank computes the same plan without communication.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from april.config.teachers import top_k_score
from april.data.support import Support
from april.learner.attention_kernels import Exchange, Packing
from april.learner.batch import TrainSample
from april.learner.vision import ImagePacker, PackedImages
from april.wire.message import Version

NEVER = -1e20
"""Logit of ids outside a support: softmax makes it 0, and its product with a gradient stays finite."""
ALIKE = 0.02
"""Relative cost difference below which micro-batches count as equally costly and are ordered by the lengths of their
samples instead."""
DUMMY_TOKENS = 2
"""Input tokens of the dummy sequence that a rank without samples runs, to take part in the collectives."""


def plan(
    lengths: list[int], ranks: int, budget_tokens: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Split samples of `lengths` tokens into `plan[m][rank]`: indices of the samples in that rank's micro-batch m.

    Every sample appears exactly once, and every rank has the same number of micro-batches, some possibly empty. A
    micro-batch holds at most `budget_tokens`; a longer sample has one of its own. The number of micro-batches is the
    smallest for which greedy placement succeeds: longest sample first, each into the cheapest micro-batch with room
    (LPT, Graham 1969). `costs` has one number per sample (default: its length). Micro-batches that run at the same time
    on different ranks have similar total cost and similar mixes of long and short samples.
    """
    if not lengths:
        return []
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    no_two_share = sum(2 * length > budget_tokens for length in lengths)
    count = max(-(-sum(min(n, budget_tokens) for n in lengths) // (ranks * budget_tokens)), -(-no_two_share // ranks))
    costs = lengths if costs is None else costs
    while (bins := assign_to_bins(lengths, costs, longest_first, count * ranks, budget_tokens)) is None:
        count += 1
    return [bins[first : first + ranks] for first in range(0, len(bins), ranks)]


def assign_to_bins(
    lengths: list[int], costs: Sequence[float], order: list[int], count: int, budget_tokens: int
) -> list[list[int]] | None:
    """Assign samples to `count` bins of at most `budget_tokens`, each to the bin of least total cost that has room; a
    longer sample gets a bin of its own. `lengths` (tokens) and `costs`: one number for each sample. `order`: indices of
    the samples in the order of their assignment. Returns the samples' indices by bin, costliest bin first and among
    similar costs the one with the longest samples first; None if the samples do not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    cost = np.zeros(count)
    tokens, squares = np.zeros((2, count), np.int64)
    for sample in order:
        length = lengths[sample]
        has_room = (tokens == 0) | (tokens + length <= budget_tokens)
        if not has_room.any():
            return None
        cheapest = int(np.argmin(np.where(has_room, cost, np.inf)))
        bins[cheapest].append(sample)
        tokens[cheapest] += length
        squares[cheapest] += length**2
        cost[cheapest] += costs[sample]
    coarse = np.floor((1 - cost / np.max(cost)) / ALIKE)
    return [bins[i] for i in np.lexsort((-squares, coarse))]


def input_tokens(sample: TrainSample) -> int:
    """Number of input tokens of a sample: all but its last token, which predicts nothing."""
    return len(sample.tokens) - 1


def seen_by_teacher(sample: TrainSample) -> int:
    """Number of input tokens of a teacher's pass over a sample, with its hint if it has one."""
    return input_tokens(sample) + (len(sample.hinted_prompt) - sample.prompt_tokens if len(sample.hinted_prompt) else 0)


def longest_input(sample: TrainSample) -> int:
    """Number of input tokens of the longer of a sample's two passes, without and with its hint."""
    return max(input_tokens(sample), seen_by_teacher(sample))


@dataclass(frozen=True, eq=False)
class PackedSupport:
    """Supports of K target tokens: the candidate token ids from which each was drawn under truncated sampling, S ids in
    total."""

    ids: Tensor
    """Token ids of all supports, concatenated target by target; int32 [S]."""
    counts: Tensor
    """Number of ids in each target's support, int64 [K]."""
    ends: np.ndarray
    """int64 [K + 1]: offsets in `ids`, 0 and then the end of each target's ids; on the CPU."""
    positions: Tensor
    """Index of each target token within its own support, int64 [K]."""

    def select(self, logits: Tensor, rows: slice) -> Tensor:
        """The logits of each target's support, for the targets `rows`. `logits`: [n, V] for n targets and V token ids;
        returns [n, W], W the size of the largest support, padded with NEVER."""
        ids, inside = self.columns(rows)
        return logits.gather(1, ids).masked_fill_(~inside, NEVER)

    def spread(self, gradient: Tensor, rows: slice, vocabulary: int) -> Tensor:
        """Gradient by the logits of all V = `vocabulary` token ids, [n, V], from the gradient by those that `select`
        returned for the targets `rows`: [n, W], W the size of the largest support, with 0 in the padding."""
        ids, _ = self.columns(rows)
        return gradient.new_zeros(len(gradient), vocabulary).scatter_add_(1, ids, gradient)

    def part(self, rows: slice) -> "PackedSupport":
        """The supports of targets `rows`."""
        ends = self.ends[rows.start : rows.stop + 1]
        return PackedSupport(self.ids[ends[0] : ends[-1]], self.counts[rows], ends - ends[0], self.positions[rows])

    def columns(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(ids in the supports of targets `rows`, int64 [n, W], padded with 0; a mask, bool [n, W], which is False in
        the padding)."""
        ends = self.ends[rows.start : rows.stop + 1]
        inside = torch.arange(int(np.diff(ends).max()), device=self.ids.device) < self.counts[rows, None]
        ids = self.ids[ends[0] : ends[-1]].long()
        return torch.zeros(inside.shape, dtype=torch.int64, device=ids.device).masked_scatter_(inside, ids), inside


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """Inputs from which a head computes the logits z of K targets: z = hidden weight^T / divisor, or with a soft cap
    cap tanh(z / cap)."""

    hidden: Tensor
    """Last hidden states, [K, D]."""
    weight: Tensor
    """Weight of the head, [V, D]."""
    divisor: float
    cap: float | None


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """T input tokens of several concatenated sequences, and the K sampled tokens that they predict."""

    ids: Tensor
    """Input token ids of all sequences, concatenated; int64 [1, T]."""
    positions: Tensor
    """Position of each input token within its sequence, from 0; int64 [1, T]."""
    seq_lens: list[int]
    """Number of input tokens of each sequence; the sum is T."""
    cu_seq_lens: Tensor
    """Cumulative sequence lengths in tokens, int32 [sequences + 1]: start of each sequence, then T."""
    target_rows: Tensor
    """For each sampled token the index in the packed row of the input token that predicts it, int64 [K]."""
    targets: Tensor
    """Token ids of the sampled tokens, int64 [K]."""
    support: PackedSupport | None = None
    """Supports of the sampled tokens (candidate ids under truncated sampling); None if sampling was not truncated."""
    is_dummy: bool = False
    """Whether this is a dummy for a rank without samples: K = 1, with zero loss and gradient."""
    images: PackedImages | None = None
    """Images of the sequences; None if those of no rank have any."""
    hinted: "MicroBatch | None" = None
    """Micro-batch of the same targets after prompts with hints; None without hints."""
    has_hint: Tensor | None = None
    """Whether each target has a hint in `hinted`, bool [K]; None without hints."""
    divergence: Callable[[HeadInputs], Tensor] | None = None
    """Divergence of the policy from a teacher at each target, float32 [K]; None without a teacher."""
    temperature: float | None = None
    """Temperature at which the policy scores the targets; None: its own."""
    exchange: Exchange | None = None
    """Set if these are one rank's tokens and targets of a row that several ranks share; `seq_lens` and `cu_seq_lens`
    are then those of the whole row."""

    @property
    def packing(self) -> Packing:
        return Packing(self.seq_lens, self.cu_seq_lens, self.exchange)


def pack(samples: list[TrainSample], device: torch.device, images: ImagePacker | None = None) -> MicroBatch:
    """Pack samples into one micro-batch; without samples a dummy micro-batch. `images` is given where this rank or
    another has images, and a rank without any computes a blank one. Raises ValueError for images that the policy does
    not take."""
    if not images and any(sample.images for sample in samples):
        raise ValueError("samples have images, and policy or back end take none; use a vision-language model")
    packed = samples
    if not samples:
        blank = np.zeros(DUMMY_TOKENS + 1, np.int32)
        packed = [TrainSample(blank, DUMMY_TOKENS, np.zeros(1, np.float32), 0.0, ((0, 1, Version(0, 0)),))]
    if images and not any(sample.images for sample in samples):
        packed = [*packed, images.blank]
    found = join(packed, device, not samples, images)
    hints = [len(sample.hinted_prompt) > 0 for sample in samples]
    if not any(hints):
        return found
    hinted = [sample.with_hint if hint else sample for sample, hint in zip(samples, hints, strict=True)]
    has_hint = torch.from_numpy(np.repeat(hints, [sample.sampled_tokens for sample in samples])).to(device)
    return replace(found, hinted=join(hinted, device, False, None), has_hint=has_hint)


def join(samples: list[TrainSample], device: torch.device, is_dummy: bool, images: ImagePacker | None) -> MicroBatch:
    seq_lens = [input_tokens(sample) for sample in samples]
    starts = list(accumulate(seq_lens, initial=0))
    rows = [
        start + sample.prompt_tokens - 1 + sample.sampled_positions
        for sample, start in zip(samples, starts, strict=False)
    ]

    def column(parts, dtype):
        return torch.from_numpy(np.concatenate(parts).astype(dtype)).to(device)

    return MicroBatch(
        ids=column([sample.tokens[:-1] for sample in samples], np.int64)[None],
        positions=column([np.arange(length) for length in seq_lens], np.int64)[None],
        seq_lens=seq_lens,
        cu_seq_lens=torch.tensor(starts, dtype=torch.int32, device=device),
        target_rows=column(rows, np.int64),
        targets=column(
            [sample.tokens[sample.prompt_tokens :][sample.sampled_positions] for sample in samples], np.int64
        ),
        support=pack_support(samples, device) if any(sample.support for sample in samples) else None,
        is_dummy=is_dummy,
        images=images.pack(samples, device) if images else None,
    )


def pack_support(samples: list[TrainSample], device: torch.device) -> PackedSupport:
    """Supports of the sampled tokens; observations have none. Raises ValueError if a sampled token has no support or is
    not in its own."""
    supports = [sample.support or Support.none(sample.response_tokens) for sample in samples]
    counts = np.concatenate(
        [support.counts[sample.sampled_positions] for sample, support in zip(samples, supports, strict=True)]
    )
    ids = np.concatenate([support.ids for support in supports])
    drawn = np.concatenate([sample.tokens[sample.prompt_tokens :][sample.sampled_positions] for sample in samples])
    packed = Support(counts, ids)
    if not packed.holds(drawn):
        raise ValueError("some sampled tokens have a support that they are not in, or none where others have one")
    return PackedSupport(
        ids=torch.from_numpy(ids).to(device),
        counts=torch.from_numpy(counts.astype(np.int64)).to(device),
        ends=np.cumsum([0, *counts], dtype=np.int64),
        positions=torch.from_numpy(packed.indices_of(drawn)).to(device),
    )


def top_pairs(samples: list[TrainSample], teachers: Collection[str]) -> np.ndarray:
    """Pairs (id, log-probability) of the k ids that the sample's teacher finds most likely at each of the K sampled
    tokens, float32 [K, k, 2]; NaN where it gave fewer, or none. `teachers`: names of the teachers that scorers ask."""
    names = {top_k_score(teacher) for teacher in teachers}
    told = [
        next((values for name, values in sample.token_scores.items() if name in names), np.zeros((0, 0)))
        for sample in samples
    ]
    width, starts = max(values.shape[1] for values in told), np.cumsum([0, *(each.sampled_tokens for each in samples)])
    pairs = np.full((starts[-1], width), np.nan, np.float32)
    for sample, values, start in zip(samples, told, starts, strict=False):
        if values.size:
            pairs[start : start + sample.sampled_tokens, : values.shape[1]] = values[sample.sampled_positions]
    return pairs.reshape(len(pairs), width // 2, 2)


# --- minibatches ------------------------------------------------------------------------------------------------------


def minibatches(groups: int, count: int, rng: random.Random) -> list[int]:
    """Number of the minibatch of each of `groups` groups, assigned at random by `rng`. Sizes of the `count` minibatches
    differ by at most one group. With fewer groups than `count` there is one minibatch for each group."""
    count = max(1, min(count, groups))
    if count == 1:
        return [0] * groups
    order = list(range(groups))
    rng.shuffle(order)
    return [position % count for position in order]
