"""Which ranks have which part of a model: of its layers, and of its experts, which may lie otherwise."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICAS, SHARES = "replicas", "shares"
"""dimensions of a mesh of ranks: those of SHARES, which are neighbours, have parts of a layer each"""


@dataclass(frozen=True)
class Layout:
    layers: DeviceMesh
    """of REPLICAS and SHARES: all but the experts"""
    experts: DeviceMesh
    """of the same: the experts"""
    expert_parallel: int
    """ranks that divide a layer's experts among them, each whole; 1: ranks that share a layer have a part of each"""

    @classmethod
    def of(cls, shares: int, expert_parallel: int, device: torch.device) -> "Layout":
        """Over the default process group. Collective."""
        layers = mesh(shares, device)
        return cls(layers, mesh(expert_parallel, device) if expert_parallel > 1 else layers, expert_parallel)

    @property
    def shares(self) -> int:
        """Ranks that share a layer."""
        return self.layers[SHARES].size()

    @property
    def cuts_experts(self) -> bool:
        """Ranks have a part of every expert."""
        return self.expert_parallel == 1 and self.shares > 1

    @property
    def is_first(self) -> bool:
        """This rank and rank 0 have parts of the same."""
        return any(0 in dist.get_process_group_ranks(each.get_group(SHARES)) for each in (self.layers, self.experts))


def mesh(shares: int, device: torch.device) -> DeviceMesh:
    shape = (dist.get_world_size() // shares, shares)
    return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICAS, SHARES))
