"""Assignment of a model's layers and experts to ranks."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from april.config import LearnerSection
from april.learner.held_tensors import Copies

STAGES, REPLICAS, SHARES = "stages", "replicas", "shares"
"""Dimensions of the mesh of ranks: pipeline stages, replicas (data parallel), and shares of a layer (tensor parallel).
Ranks along SHARES are neighbours; ranks of one stage are consecutive."""


@dataclass(frozen=True)
class ParallelLayout:
    """Assignment of this rank to a pipeline stage, a replica and a share of each layer, with the meshes of the ranks in
    its stage."""

    layers: DeviceMesh
    """Mesh (REPLICAS, SHARES) of the ranks of this rank's stage, for all parameters but those of experts."""
    experts: DeviceMesh
    """Mesh (REPLICAS, SHARES) of the ranks of this rank's stage, for the parameters of experts."""
    expert_parallel: int
    """Number of ranks among which a layer's experts are divided, each rank holding complete experts; 1: every expert is
    split over the tensor-parallel ranks."""
    stage: int
    """Pipeline stage of this rank, from 0."""
    stages: int
    """Number of pipeline stages."""

    @classmethod
    def from_section(cls, section: LearnerSection, device: torch.device) -> "ParallelLayout":
        """The layout of `learner`'s parallelism over the default process group. Collective."""
        stages, experts = section.pipeline_parallel, section.expert_parallel
        layers = mesh(stages, section.tensor_parallel, device)
        stage = dist.get_rank() * stages // dist.get_world_size()
        return cls(layers, mesh(stages, experts, device) if experts > 1 else layers, experts, stage, stages)

    @property
    def tensor_parallel(self) -> int:
        """Number of tensor-parallel ranks, which share a layer."""
        return self.layers[SHARES].size()

    @property
    def splits_experts(self) -> bool:
        """Whether every expert is split over the tensor-parallel ranks."""
        return self.expert_parallel == 1 and self.tensor_parallel > 1

    @property
    def is_last(self) -> bool:
        """Whether this rank's pipeline stage is the last one."""
        return self.stage == self.stages - 1

    def leader(self, stage: int) -> int:
        """Lowest global rank of a pipeline stage."""
        return stage * dist.get_world_size() // self.stages

    @property
    def holds_leader_part(self) -> bool:
        """Whether this rank is in the same replica of its pipeline stage as the stage's lowest rank. The meshes
        `layers` and `experts` form different replicas; one of the two suffices."""
        leader, groups = self.leader(self.stage), (each.get_group(SHARES) for each in (self.layers, self.experts))
        return any(leader in dist.get_process_group_ranks(group) for group in groups)

    def stage_layers(self, layers: int, stage: int) -> range:
        """Indices of the layers in a stage, of `layers` in total. Stages differ by at most one layer; the last stage,
        which has the head, is the last to get an extra one."""
        first, end = (-(-layers * each // self.stages) for each in (stage, stage + 1))
        return range(first, end)


@cache
def copies_in(stage: int, stages: int, shares: int) -> Copies:
    """For each copy of a tensor that pipeline stage `stage` of `stages` holds, the ranks that hold it: one copy per
    replica, each divided among `shares` ranks."""
    return Copies(torch.arange(dist.get_world_size()).view(stages, -1, shares)[stage].tolist())


def mesh(stages: int, shares: int, device: torch.device) -> DeviceMesh:
    """Mesh (REPLICAS, SHARES) of this rank's stage, with `shares` ranks along SHARES. Collective."""
    shape = (stages, dist.get_world_size() // (stages * shares), shares)
    return init_device_mesh(device.type, shape, mesh_dim_names=(STAGES, REPLICAS, SHARES))[REPLICAS, SHARES]
