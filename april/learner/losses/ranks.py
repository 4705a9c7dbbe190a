"""What a part that sees a whole batch asks of the other ranks. Every rank asks the same, in the same order."""

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Those of the default process group."""

    def total(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, the same on each."""
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    def gathered(self, column: Tensor) -> Tensor:
        """The ranks' columns end to end, the same on each; [K of this rank, perhaps 0] -> [K of all]."""
        count = torch.tensor([len(column)], device=column.device)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, count)
        lengths = [int(each) for each in counts]
        padded = column.new_zeros(max(lengths))
        padded[: len(column)] = column
        columns = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(columns, padded)
        return torch.cat([each[:length] for each, length in zip(columns, lengths, strict=True)])
