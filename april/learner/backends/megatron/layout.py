"""Which ranks have which part of a model: of its layers, and of its experts, which may lie otherwise."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from april.config import LearnerSection

STAGES, REPLICAS, SHARES = "stages", "replicas", "shares"
"""dimensions of a mesh of ranks: those of SHARES, which are neighbours, have parts of a layer each; those of one of
STAGES, which follow each other, have the same layers together"""


@dataclass(frozen=True)
class Layout:
    layers: DeviceMesh
    """of REPLICAS and SHARES, the ranks of this one's stage: all but the experts"""
    experts: DeviceMesh
    """of the same: the experts"""
    expert_parallel: int
    """ranks that divide a layer's experts among them, each whole; 1: ranks that share a layer have a part of each"""
    stage: int
    """this rank's"""
    stages: int

    @classmethod
    def of(cls, section: LearnerSection, device: torch.device) -> "Layout":
        """Over the default process group. Collective."""
        stages, experts = section.pipeline_parallel, section.expert_parallel
        layers = mesh(stages, section.tensor_parallel, device)
        stage = dist.get_rank() * stages // dist.get_world_size()
        return cls(layers, mesh(stages, experts, device) if experts > 1 else layers, experts, stage, stages)

    @property
    def shares(self) -> int:
        """Ranks that share a layer."""
        return self.layers[SHARES].size()

    @property
    def cuts_experts(self) -> bool:
        """Ranks have a part of every expert."""
        return self.expert_parallel == 1 and self.shares > 1

    @property
    def is_last(self) -> bool:
        """Of the stages."""
        return self.stage == self.stages - 1

    def leader(self, stage: int) -> int:
        """The first rank of a stage."""
        return stage * dist.get_world_size() // self.stages

    @property
    def is_first(self) -> bool:
        """This rank and the first of its stage have parts of the same."""
        leader, groups = self.leader(self.stage), (each.get_group(SHARES) for each in (self.layers, self.experts))
        return any(leader in dist.get_process_group_ranks(group) for group in groups)

    def span(self, layers: int, stage: int) -> range:
        """Of so many layers those of a stage: as many in each, or one more in some, of which the last, which has the
        head, is the last to get one."""
        first, end = (-(-layers * each // self.stages) for each in (stage, stage + 1))
        return range(first, end)


def mesh(stages: int, shares: int, device: torch.device) -> DeviceMesh:
    """Of this rank's stage."""
    shape = (stages, dist.get_world_size() // (stages * shares), shares)
    return init_device_mesh(device.type, shape, mesh_dim_names=(STAGES, REPLICAS, SHARES))[REPLICAS, SHARES]
