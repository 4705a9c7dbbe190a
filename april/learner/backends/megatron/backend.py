"""A policy whose layers lie on several ranks each. Replicas of it have a part of the batch each, and hold the same."""

import math
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from april.config import Config
from april.learner import flops
from april.learner.backends.backend import Backend
from april.learner.backends.megatron.model import MegatronPolicy
from april.learner.backends.megatron.names import REPLICAS, SHARES
from april.learner.checkpoint import MOMENTS, Part
from april.learner.gradients import adamw
from april.learner.losses.ranks import Ranks
from april.learner.model import outline

OF_OWN_HEADS = ("q_layernorm.weight", "k_layernorm.weight")
"""parameters that all ranks of a layer have, and of which each sees the gradient of its own heads alone"""


class MegatronPart(Part):
    """In a checkpoint are Hugging Face tensors, so that any back end can go on from it."""

    def tensors_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """It and its moments."""
        moments = self.optimizer.state.get(parameter, {})
        return {"model": parameter} | {moment: moments[moment] for moment in MOMENTS if moments}

    def state(self) -> dict[str, Tensor]:
        return {
            f"{self.prefix}{kind}.{piece.name}": piece.of(tensor)
            for piece in self.model.pieces
            for kind, tensor in self.tensors_of(piece.parameter).items()
        }

    def take(self, state: dict[str, Tensor]) -> None:
        for piece in self.model.pieces:
            for kind, tensor in self.tensors_of(piece.parameter).items():
                piece.put(tensor, state[f"{self.prefix}{kind}.{piece.name}"].to_local())


class MegatronBackend(Backend):
    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.computes_in, self.adapter = "float32", {"rank": 0}
        section = config.learner
        each = section.tensor_parallel
        share_layers(each, section.collective_timeout_s)
        shape = (dist.get_world_size() // each, each)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=(REPLICAS, SHARES))
        self.shares, self.ranks = Ranks(self.mesh.get_group(SHARES)), Ranks(self.mesh.get_group(REPLICAS))
        self.gathers_over = self.shares.group
        self.lm = outline(config.model.path, config.sampling.temperature).lm
        self.cost = flops.cost(self.lm)
        self.policy = self.load().train()
        optimizer = adamw([parameter for _, parameter in self.policy.trained], section.lr, section)
        self.part = MegatronPart("", self.policy, optimizer)
        divided = {id(piece.parameter) for piece in self.policy.pieces if piece.dim is not None}
        self.whole = [parameter for _, parameter in self.policy.trained if id(parameter) not in divided]
        """that all ranks of a layer have"""

    def load(self) -> MegatronPolicy:
        return MegatronPolicy(self.lm, self.config.model.path, self.config.sampling.temperature, self.mesh).to(
            self.device
        )

    def reference(self) -> nn.Module:
        return self.load().requires_grad_(False).eval()

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return ((piece.name, piece.of(piece.parameter)) for piece in self.policy.pieces)

    def rest(self) -> None:
        """Nothing is held."""

    def clip(self, most: float) -> float:
        named = [(name, each.grad) for name, each in self.policy.trained if each.grad is not None]
        add_up([gradient for name, gradient in named if name.endswith(OF_OWN_HEADS)], self.shares)
        gradients = [gradient for _, gradient in named]
        add_up(gradients, self.ranks)
        twice = {id(parameter.grad) for parameter in self.whole} if self.shares.place else set()
        counted = [gradient for gradient in gradients if id(gradient) not in twice]
        norm = self.shares.total(torch.nn.utils.get_total_norm(counted).double().square()).sqrt().item()
        if norm > most and math.isfinite(norm):
            torch._foreach_mul_(gradients, most / norm)
        return norm


def add_up(gradients: list[Tensor], ranks: Ranks) -> None:
    """Each over the ranks, in place. Collective."""
    if ranks.count == 1 or not gradients:
        return
    summed = ranks.total(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, found in zip(gradients, summed.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(found.view_as(gradient))


def share_layers(each: int, timeout_s: float) -> None:
    """Make Megatron's process groups: neighbouring ranks share layers, `each` of them. Collective."""
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == each:
            return
        parallel_state.destroy_model_parallel()
    minutes = timedelta(seconds=timeout_s) / timedelta(minutes=1)
    parallel_state.initialize_model_parallel(each, distributed_timeout_minutes=max(1, math.ceil(minutes)))
