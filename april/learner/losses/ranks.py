"""What a part that sees a whole batch asks of the other ranks. Every rank asks the same, in the same order."""

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Those of the default process group, or of `group`: each has another part of a batch."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def place(self) -> int:
        """Of this rank among them."""
        return dist.get_rank(self.group)

    def total(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, the same on each."""
        summed = values.clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def total_and_largest(self, values: Tensor, of_each: Tensor) -> tuple[Tensor, Tensor]:
        """The total of `values`, and of each of the others the largest of the ranks, the same on each. They go at once:
        between machines both take no longer than one."""
        summed, largest = values.clone(), of_each.clone()
        for work in [
            dist.all_reduce(summed, group=self.group, async_op=True),
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True),
        ]:
            work.wait()
        return summed, largest

    def gathered(self, column: Tensor) -> Tensor:
        """The ranks' columns end to end, the same on each; [K of this rank, perhaps 0] -> [K of all]."""
        count = torch.tensor([len(column)], device=column.device)
        counts = [torch.empty_like(count) for _ in range(self.count)]
        dist.all_gather(counts, count, group=self.group)
        lengths = [int(each) for each in counts]
        padded = column.new_zeros(max(lengths))
        padded[: len(column)] = column
        columns = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(columns, padded, group=self.group)
        return torch.cat([each[:length] for each, length in zip(columns, lengths, strict=True)])
