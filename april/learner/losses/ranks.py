"""Collectives over the ranks that share a batch. Every rank makes the same calls in the same order."""

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Collectives of a process group, by default of the default group, whose ranks hold different parts of a batch."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks, the same on each (all-reduce). Collective."""
        summed = values.clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def total_and_largest(self, values: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of `values` and maximum of `maxima` over the ranks, the same on each. Collective.

        Both all-reduces run at the same time: between machines they take no longer than one.
        """
        summed, largest = values.clone(), maxima.clone()
        for work in [
            dist.all_reduce(summed, group=self.group, async_op=True),
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True),
        ]:
            work.wait()
        return summed, largest

    def gathered(self, column: Tensor) -> Tensor:
        """The columns of all ranks concatenated, the same on each; [K of this rank] -> [K of all], K may be 0.
        Collective."""
        count = torch.tensor([len(column)], device=column.device)
        counts = [torch.empty_like(count) for _ in range(self.count)]
        dist.all_gather(counts, count, group=self.group)
        lengths = [int(each) for each in counts]
        padded = column.new_zeros(max(lengths))
        padded[: len(column)] = column
        columns = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(columns, padded, group=self.group)
        return torch.cat([each[:length] for each, length in zip(columns, lengths, strict=True)])


class SingleRank(Ranks):
    """The collectives of one rank without a process group."""

    count, rank = 1, 0

    def total(self, values: Tensor) -> Tensor:
        return values.clone()

    def total_and_largest(self, values: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        return values.clone(), maxima.clone()

    def gathered(self, column: Tensor) -> Tensor:
        return column
