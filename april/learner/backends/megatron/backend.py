"""A policy whose layers lie on several ranks each, in stages that follow each other. Replicas of it have a part of the
batch each, and hold the same."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from april.config import Config
from april.learner import flops
from april.learner.backends.backend import Backend, Loss
from april.learner.backends.megatron import pipeline
from april.learner.backends.megatron.groups import make_ready
from april.learner.backends.megatron.layout import REPLICAS, SHARES, Layout
from april.learner.backends.megatron.model import MegatronPolicy
from april.learner.backends.megatron.names import stages_with
from april.learner.backends.megatron.piece import Piece, Stack
from april.learner.checkpoint import MOMENTS, Part
from april.learner.gradients import adamw
from april.learner.losses.ranks import Ranks
from april.learner.model import as_in_files, gathered, outline, uses_bf16
from april.learner.packing import MicroBatch
from april.learner.phases import Seconds, untimed

OF_OWN_HEADS = ("q_layernorm.weight", "k_layernorm.weight")
"""parameters that all ranks of a layer have, and of which each sees the gradient of its own heads alone"""


class MegatronPart(Part):
    """In a checkpoint are Hugging Face tensors, so that any back end can go on from it. A rank names those of its
    stage."""

    def tensors_of(self, piece: Piece) -> dict[str, Sequence[Tensor]]:
        """Its parameters and their moments."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in piece.parameters]
        return {"model": piece.parameters} | {
            moment: [state[moment] for state in states] for moment in MOMENTS if all(states)
        }

    def state(self) -> dict[str, Tensor]:
        return {
            f"{self.prefix}{kind}.{piece.name}": piece.of(tensors)
            for piece in self.model.pieces
            for kind, tensors in self.tensors_of(piece).items()
        }

    def take(self, state: dict[str, Tensor]) -> None:
        for piece in self.model.pieces:
            for kind, tensors in self.tensors_of(piece).items():
                piece.put(tensors, state[f"{self.prefix}{kind}.{piece.name}"].to_local())
        self.model.round()


class MegatronBackend(Backend):
    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        section, self.adapter = config.learner, {"rank": 0}
        self.bf16 = uses_bf16(section, device)
        self.computes_in = "bfloat16" if self.bf16 else "float32"
        make_ready(section, device)
        self.layout = layout = Layout.of(section, device)
        stages = parallel_state.get_pipeline_model_parallel_group()
        self.line, self.stages = pipeline.Line(stages), Ranks(stages)
        self.shares, self.ranks = (Ranks(layout.layers.get_group(dim)) for dim in (SHARES, REPLICAS))
        self.expert_shares, self.expert_ranks = (Ranks(layout.experts.get_group(dim)) for dim in (SHARES, REPLICAS))
        self.lm = outline(config.model.path, config.sampling.temperature).lm
        self.cost = flops.cost(self.lm)
        self.policy = self.load().train()
        optimizer = adamw([parameter for _, parameter in self.policy.trained], section.lr, section)
        optimizer.register_step_post_hook(lambda *_: self.policy.round())
        self.part = MegatronPart("", self.policy, optimizer)
        pieces = {id(parameter): piece for piece in self.policy.pieces for parameter in piece.parameters}
        self.experts: list[nn.Parameter] = []
        self.divided: list[nn.Parameter] = []
        """others that a rank has a part of"""
        self.whole: list[nn.Parameter] = []
        """that all ranks of a layer have"""
        self.seen_in_parts: list[nn.Parameter] = []
        """of the latter, those whose gradient is the sum of what these ranks see"""
        self.tied: list[nn.Parameter] = []
        """that both the first and the last stage have"""
        self.counted_elsewhere: set[nn.Parameter] = set()
        """of which only the first says what they add to the norm"""
        for name, parameter in self.policy.trained:
            piece = pieces[id(parameter)]
            kind = self.experts if isinstance(piece, Stack) else self.whole if piece.dim is None else self.divided
            kind.append(parameter)
            if kind is self.whole and (self.policy.divides_tokens or name.endswith(OF_OWN_HEADS)):
                self.seen_in_parts.append(parameter)
            found = stages_with(piece.name, self.lm, layout)
            if len(found) > 1:
                self.tied.append(parameter)
                if layout.stage != found[0]:
                    self.counted_elsewhere.add(parameter)
        self.ends = Ranks(parallel_state.get_embedding_group()) if self.tied else None
        """those two"""

    def scores(
        self, model: nn.Module, micros: Sequence[MicroBatch], temperature: float | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(pipeline.scores(self.line, model, micros, temperature))

    def backward(self, micros: Sequence[MicroBatch], loss: Loss, seconds: Seconds = untimed) -> None:
        pipeline.backward(self.line, self.policy, micros, loss, seconds)

    def load(self) -> MegatronPolicy:
        path, temperature = self.config.model.path, self.config.sampling.temperature
        return MegatronPolicy(self.lm, path, temperature, self.layout, self.bf16).to(self.device)

    def reference(self) -> nn.Module:
        return self.load().requires_grad_(False).eval()

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Of this rank's stage."""
        pieces = self.policy.pieces if self.layout.is_first else ()
        return ((piece.name, piece.of(piece.parameters)) for piece in pieces if self.publishes(piece.name))

    def publishes(self, name: str) -> bool:
        """This rank's stage does so."""
        return stages_with(name, self.lm, self.layout)[0] == self.layout.stage

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Gathered on the first rank of each stage, and sent to rank 0 from there."""
        rank, leader = dist.get_rank(), self.layout.leader(self.layout.stage)
        state = gathered(self.tensors(), dtype, leader)
        if rank not in (0, leader):
            return {}
        for name, tensor in self.lm.named_parameters():
            home, *_ = stages_with(name, self.lm, self.layout)
            if home and rank == 0:
                state[name] = torch.empty(tensor.shape, dtype=dtype or torch.float32)
                dist.recv(state[name], self.layout.leader(home))
            elif home and self.publishes(name):
                dist.send(state.pop(name), 0)
        return as_in_files(self.lm, state) if rank == 0 else {}

    def rest(self) -> None:
        """Nothing is held."""

    def clip(self, most: float) -> float:
        experts, divided, whole = map(gradients, (self.experts, self.divided, self.whole))
        add_up(gradients(self.seen_in_parts), self.shares)
        add_up(whole + divided, self.ranks)
        add_up(experts, self.expert_ranks)
        if self.ends:
            add_up(gradients(self.tied), self.ends)
        parameters = self.divided if self.shares.place else self.whole + self.divided
        counted = gradients(parameter for parameter in parameters if parameter not in self.counted_elsewhere)
        own = square(counted, self.shares) + square(experts, self.expert_shares)
        norm = math.sqrt(self.stages.total(torch.tensor(own, dtype=torch.float64, device=self.device)).item())
        if norm > most and math.isfinite(norm):
            torch._foreach_mul_(experts + divided + whole, most / norm)
        return norm


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def square(gradients: list[Tensor], ranks: Ranks) -> float:
    """Of the norm of what the ranks have together; they have some, or none has any. Collective."""
    return ranks.total(torch.nn.utils.get_total_norm(gradients).double().square()).item() if gradients else 0.0


def add_up(gradients: list[Tensor], ranks: Ranks) -> None:
    """Each over the ranks, in place. Collective."""
    if ranks.count == 1 or not gradients:
        return
    summed = ranks.total(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, found in zip(gradients, summed.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(found.view_as(gradient))
