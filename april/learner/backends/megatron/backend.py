"""Megatron-core back end: layers are shared by tensor-parallel ranks and divided into pipeline stages. Each replica of
the model trains a part of the batch."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from april.config import Config
from april.learner import performance
from april.learner.backends.backend import Backend, Loss
from april.learner.backends.megatron import pipeline
from april.learner.backends.megatron.groups import initialise_megatron
from april.learner.backends.megatron.layout import REPLICAS, SHARES, ParallelLayout, copies_in
from april.learner.backends.megatron.model import MegatronPolicy
from april.learner.backends.megatron.names import stages_holding
from april.learner.backends.megatron.piece import MappedTensor, Sharding, StackedExperts
from april.learner.checkpoint import CheckpointPart
from april.learner.held_tensors import HeldTensor
from april.learner.losses.ranks import Ranks
from april.learner.model import empty_policy, gather_tensors, hugging_face_state, uses_bf16
from april.learner.optimizers.adamw import AdamW
from april.learner.packing import MicroBatch
from april.learner.performance import Seconds, untimed
from april.learner.process_group import all_gather_values
from april.learner.weight_parts import DivisibleWeights, WeightTensor

OF_OWN_HEADS = ("q_layernorm.weight", "k_layernorm.weight")
"""Names of parameters that are replicated over the tensor-parallel ranks while each rank computes the gradient of its
own attention heads only, so that gradients must be summed."""


class MegatronPart(CheckpointPart):
    """The policy as stored in a checkpoint: Hugging Face tensors, so that any back end can resume from them. A rank
    stores the tensors of its pipeline stage."""

    def tensors_of(self, mapped: MappedTensor) -> dict[str, Sequence[Tensor]]:
        """What a checkpoint stores of a Hugging Face tensor, by kind: under "model" the Megatron parameters that hold
        it, and under the name of each of the optimizer's moments the moments of these parameters, in the same order."""
        moments = [self.optimizer.moments(parameter) for parameter in mapped.parameters]
        return {"model": mapped.parameters} | {name: [each[name] for each in moments] for name in moments[0]}

    def state(self) -> dict[str, Tensor]:
        return {
            f"{self.prefix}{kind}.{mapped.name}": mapped.to_hugging_face(tensors)
            for mapped in self.model.mapped_tensors
            for kind, tensors in self.tensors_of(mapped).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for mapped in self.model.mapped_tensors:
            for kind, tensors in self.tensors_of(mapped).items():
                mapped.from_hugging_face(tensors, state[f"{self.prefix}{kind}.{mapped.name}"].to_local())
        self.model.round()


class MegatronBackend(Backend):
    """A Megatron-core `GPTModel` with tensor, pipeline and expert parallelism."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        section, self.adapter = config.learner, {"rank": 0}
        self.bf16 = uses_bf16(section, device)
        self.compute_dtype = "bfloat16" if self.bf16 else "float32"
        initialise_megatron(section, device)
        self.layout = layout = ParallelLayout.from_section(section, device)
        stages = parallel_state.get_pipeline_model_parallel_group()
        self.pipeline_ranks, self.stages = pipeline.PipelineRanks(stages), Ranks(stages)
        self.tensor_ranks, self.ranks = (Ranks(layout.layers.get_group(dim)) for dim in (SHARES, REPLICAS))
        self.expert_tensor_ranks, self.expert_data_ranks = (
            Ranks(layout.experts.get_group(dim)) for dim in (SHARES, REPLICAS)
        )
        self.lm = empty_policy(config.model.path, config.sampling.temperature).lm
        self.divisible = DivisibleWeights(self.lm)
        self.cost = performance.forward_cost(self.lm)
        self.policy = self.load().train()
        self.part = MegatronPart.of("", self.policy, section.lr, section)
        cast(AdamW, self.part.optimizer).inner.register_step_post_hook(lambda *_: self.policy.round())
        mapped_by_parameter = {
            id(parameter): mapped for mapped in self.policy.mapped_tensors for parameter in mapped.parameters
        }
        self.experts: list[nn.Parameter] = []
        """Parameters of this rank's experts."""
        self.divided: list[nn.Parameter] = []
        """Parameters other than experts that are sharded over the tensor-parallel ranks."""
        self.whole: list[nn.Parameter] = []
        """Parameters of which each tensor-parallel rank holds a full replica."""
        self.partial_gradients: list[nn.Parameter] = []
        """Replicated parameters whose gradient must be summed over the tensor-parallel ranks."""
        self.tied: list[nn.Parameter] = []
        """Parameters held by both the first and the last pipeline stage: an embedding tied to the head."""
        self.counted_elsewhere: set[nn.Parameter] = set()
        """Tied parameters of this stage that count in the gradient norm of another stage."""
        for name, parameter in self.policy.trained:
            mapped = mapped_by_parameter[id(parameter)]
            kind = (
                self.experts
                if isinstance(mapped, StackedExperts)
                else self.whole
                if mapped.dim is None
                else self.divided
            )
            kind.append(parameter)
            if kind is self.whole and (self.policy.divides_tokens or name.endswith(OF_OWN_HEADS)):
                self.partial_gradients.append(parameter)
            holding_stages = stages_holding(mapped.name, self.lm, layout)
            if len(holding_stages) > 1:
                self.tied.append(parameter)
                if layout.stage != holding_stages[0]:
                    self.counted_elsewhere.add(parameter)
        self.ends = Ranks(parallel_state.get_embedding_group()) if self.tied else None
        """Process group of the first and the last pipeline stage, which sums gradients of tied parameters; None without
        tied parameters."""

    def scores(
        self, model: nn.Module, micros: Sequence[MicroBatch], temperature: float | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(pipeline.scores(self.pipeline_ranks, model, micros, temperature))

    def backward(self, micros: Iterable[MicroBatch], loss: Loss, seconds: Seconds = untimed) -> None:
        pipeline.backward(self.pipeline_ranks, self.policy, list(micros), loss, seconds)

    def load(self) -> MegatronPolicy:
        path, temperature = self.config.model.path, self.config.sampling.temperature
        return MegatronPolicy(self.lm, path, temperature, self.layout, self.bf16).to(self.device)

    def reference(self) -> nn.Module:
        return self.load().requires_grad_(False).eval()

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Weights that this rank's pipeline stage publishes; empty on ranks outside the stage's first replica."""
        tensors = self.policy.mapped_tensors if self.layout.holds_leader_part else ()
        return (
            (mapped.name, mapped.to_hugging_face(mapped.parameters))
            for mapped in tensors
            if self.publishes(mapped.name)
        )

    def publishes(self, name: str) -> bool:
        """Whether this rank's stage is the first one that holds the tensor `name`, and so publishes it."""
        return stages_holding(name, self.lm, self.layout)[0] == self.layout.stage

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All weights by Hugging Face name in `dtype` (None: float32) on rank 0, {} on other ranks: each stage gathers
        its own weights on its first rank, which sends them to rank 0. Collective."""
        rank, leader = dist.get_rank(), self.layout.leader(self.layout.stage)
        state = gather_tensors(self.tensors(), dtype, leader)
        if rank not in (0, leader):
            return {}
        for name, tensor in self.lm.named_parameters():
            stage, *_ = stages_holding(name, self.lm, self.layout)
            if stage and rank == 0:
                state[name] = torch.empty(tensor.shape, dtype=dtype or torch.float32)
                dist.recv(state[name], self.layout.leader(stage))
            elif stage and self.publishes(name):
                dist.send(state.pop(name), 0)
        return hugging_face_state(self.lm, state) if rank == 0 else {}

    def divisible_weights(self) -> list[WeightTensor] | None:
        own = {mapped.name: mapped for mapped in self.policy.mapped_tensors if self.publishes(mapped.name)}
        shardings: dict[str, Sharding] = {}
        for theirs in all_gather_values({name: each.sharding for name, each in own.items()}, dict[str, Sharding]):
            shardings |= theirs

        def held(name: str) -> HeldTensor:
            sharding, (stage, *_) = shardings[name], stages_holding(name, self.lm, self.layout)
            copies = copies_in(stage, self.layout.stages, sharding.shares)
            values = own[name].values if name in own else no_values
            return HeldTensor(torch.Size(sharding.shape), copies, values, self.device, sharding.dim)

        return self.divisible.tensors((name, held(name)) for name, _ in self.lm.named_parameters())

    def free_gathered(self) -> None:
        """Does nothing: this back end holds no gathered weights after a forward pass."""

    def clip(self, max_norm: float) -> float:
        experts, divided, whole = map(gradients, (self.experts, self.divided, self.whole))
        sum_over_ranks(gradients(self.partial_gradients), self.tensor_ranks)
        sum_over_ranks(whole + divided, self.ranks)
        sum_over_ranks(experts, self.expert_data_ranks)
        if self.ends:
            sum_over_ranks(gradients(self.tied), self.ends)
        parameters = self.divided if self.tensor_ranks.rank else self.whole + self.divided
        counted = gradients(parameter for parameter in parameters if parameter not in self.counted_elsewhere)
        own = square(counted, self.tensor_ranks) + square(experts, self.expert_tensor_ranks)
        norm = math.sqrt(self.stages.total(torch.tensor(own, dtype=torch.float64, device=self.device)).item())
        if norm > max_norm and math.isfinite(norm):
            torch._foreach_mul_(experts + divided + whole, max_norm / norm)
        return norm


def no_values(first: int, end: int) -> Tensor:
    """The function `HeldTensor.values` of a tensor that only other pipeline stages hold: for any range from `first` to
    `end` it returns an empty tensor, since this rank has no values."""
    return torch.empty(0)


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def square(gradients: list[Tensor], ranks: Ranks) -> float:
    """Squared L2 norm of gradients sharded over `ranks`; all ranks have gradients, or none has. Collective."""
    return ranks.total(torch.nn.utils.get_total_norm(gradients).double().square()).item() if gradients else 0.0


def sum_over_ranks(gradients: list[Tensor], ranks: Ranks) -> None:
    """Sum each gradient over `ranks`, in place. Collective."""
    if ranks.count == 1 or not gradients:
        return
    total = ranks.total(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, summed in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
