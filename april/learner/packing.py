"""Which sample goes into which forward pass of which rank, and samples joined without padding.

`plan` is a pure function of lengths, so every rank computes the same plan without talking to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from april.data.support import Support
from april.learner.batch import TrainSample
from april.wire.version import Version

NEVER = -1e20
"""a logit that softmax makes 0 of, and that stays finite where it is multiplied with a gradient"""
ALIKE = 0.02
"""micro-batches whose costs differ by less, as a share of the costliest, are told apart by the lengths in them"""
DUMMY_TOKENS = 2
"""length of the sequence that a rank without samples runs, so that it joins the others' collectives"""


def plan(
    lengths: list[int], ranks: int, budget_tokens: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Split samples of `lengths` tokens into `plan[m][rank]`: the samples of that rank's micro-batch m.

    Every sample appears exactly once and every rank has the same number of micro-batches, some possibly empty.
    A micro-batch holds at most `budget_tokens`, except that a longer sample is alone in its own. The number of
    micro-batches is the smallest that the greedy placement reaches: longest first, each into the cheapest
    one with room (LPT, Graham 1969). Micro-batches that run side by side have similar sums of `costs`, one for each
    sample: its length, if they are not given; and similar mixes of long and short samples, so that what the costs leave
    out is similar, too.
    """
    if not lengths:
        return []
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    no_two_share = sum(2 * length > budget_tokens for length in lengths)
    count = max(-(-sum(min(n, budget_tokens) for n in lengths) // (ranks * budget_tokens)), -(-no_two_share // ranks))
    costs = lengths if costs is None else costs
    while (bins := place(lengths, costs, longest_first, count * ranks, budget_tokens)) is None:
        count += 1
    return [bins[first : first + ranks] for first in range(0, len(bins), ranks)]


def place(
    lengths: list[int], costs: Sequence[float], order: list[int], count: int, budget_tokens: int
) -> list[list[int]] | None:
    """`count` bins, the costliest first, and among those of like cost those with the longest samples; None if the
    samples do not fit into so few."""
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
    coarse = np.floor((1 - cost / cost.max()) / ALIKE)
    return [bins[i] for i in np.lexsort((-squares, coarse))]


def input_tokens(sample: TrainSample) -> int:
    """Tokens that go through the model: all but the last, from which nothing is predicted."""
    return len(sample.tokens) - 1


@dataclass(frozen=True, eq=False)
class PackedSupport:
    """The ids that each of K targets was drawn from, S in all, for a head that works through its logits row by row."""

    ids: Tensor
    """int32 [S], target by target"""
    counts: Tensor
    """int64 [K]"""
    ends: np.ndarray
    """int64 [K + 1]: where the ids of each target end, from 0 on; on the CPU"""
    places: Tensor
    """int64 [K]: each target's among its ids"""

    def select(self, logits: Tensor, rows: slice) -> Tensor:
        """[n, W]: of the `rows` of logits, [n, V], those of each one's ids in their order, and NEVER behind them."""
        ids, inside = self.columns(rows)
        return logits.gather(1, ids).masked_fill_(~inside, NEVER)

    def spread(self, gradient: Tensor, rows: slice, vocabulary: int) -> Tensor:
        """[n, V]: the gradient of what `select` has selected, 0 behind the ids, as that of the logits."""
        ids, _ = self.columns(rows)
        return gradient.new_zeros(len(gradient), vocabulary).scatter_add_(1, ids, gradient)

    def columns(self, rows: slice) -> tuple[Tensor, Tensor]:
        """int64 [n, W]: the ids of the targets `rows`, and 0 behind them; bool [n, W]: which are ids."""
        ends = self.ends[rows.start : rows.stop + 1]
        inside = torch.arange(int(np.diff(ends).max()), device=self.ids.device) < self.counts[rows, None]
        ids = self.ids[ends[0] : ends[-1]].long()
        return torch.zeros(inside.shape, dtype=torch.int64, device=ids.device).masked_scatter_(inside, ids), inside


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """T input tokens of several sequences end to end, and the K sampled tokens that they predict."""

    ids: Tensor
    """int64 [1, T]"""
    positions: Tensor
    """int64 [1, T], counted from 0 in every sequence"""
    seq_lens: list[int]
    """input tokens of each sequence; they add up to T"""
    cu_seq_lens: Tensor
    """int32 [sequences + 1]: where each sequence starts, and T"""
    target_rows: Tensor
    """int64 [K]: the input token that each sampled token is predicted from"""
    targets: Tensor
    """int64 [K]: the sampled tokens"""
    support: PackedSupport | None = None
    """of the sampled tokens, where the distribution was cut"""
    is_dummy: bool = False
    """stands in where a rank has no samples: K = 1, and its loss and gradient are zero"""


def pack(samples: list[TrainSample], device: torch.device) -> MicroBatch:
    """Join samples into one micro-batch; without samples, a dummy one."""
    if not samples:
        blank = np.zeros(DUMMY_TOKENS + 1, np.int32)
        dummy = TrainSample(blank, DUMMY_TOKENS, np.zeros(1, np.float32), 0.0, ((0, 1, Version(0, 0)),))
        return join([dummy], device, is_dummy=True)
    return join(samples, device, is_dummy=False)


def join(samples: list[TrainSample], device: torch.device, is_dummy: bool) -> MicroBatch:
    seq_lens = [input_tokens(sample) for sample in samples]
    starts = list(accumulate(seq_lens, initial=0))
    rows = [start + sample.prompt_tokens - 1 + sample.sampled for sample, start in zip(samples, starts, strict=False)]

    def column(parts, dtype):
        return torch.from_numpy(np.concatenate(parts).astype(dtype)).to(device)

    return MicroBatch(
        ids=column([sample.tokens[:-1] for sample in samples], np.int64)[None],
        positions=column([np.arange(length) for length in seq_lens], np.int64)[None],
        seq_lens=seq_lens,
        cu_seq_lens=torch.tensor(starts, dtype=torch.int32, device=device),
        target_rows=column(rows, np.int64),
        targets=column([sample.tokens[sample.prompt_tokens :][sample.sampled] for sample in samples], np.int64),
        support=pack_support(samples, device) if any(sample.support for sample in samples) else None,
        is_dummy=is_dummy,
    )


def pack_support(samples: list[TrainSample], device: torch.device) -> PackedSupport:
    """Of their sampled tokens, which all have one; of observations, which have none. Raises ValueError."""
    supports = [sample.support or Support.none(sample.response_tokens) for sample in samples]
    counts = np.concatenate([support.counts[sample.sampled] for sample, support in zip(samples, supports, strict=True)])
    ids = np.concatenate([support.ids for support in supports])
    drawn = np.concatenate([sample.tokens[sample.prompt_tokens :][sample.sampled] for sample in samples])
    packed = Support(counts, ids)
    if not packed.holds(drawn):
        raise ValueError("some sampled tokens have a support that they are not in, or none where others have one")
    return PackedSupport(
        ids=torch.from_numpy(ids).to(device),
        counts=torch.from_numpy(counts.astype(np.int64)).to(device),
        ends=np.cumsum([0, *counts], dtype=np.int64),
        places=torch.from_numpy(packed.places(drawn)).to(device),
    )
