"""Interface of a back end: a policy distributed over the ranks of the default process group, and its optimizer.

backend = BACKENDS.find(name).build(config, device)     # load: each rank reads its own part of the model's files
scores = backend.scores(backend.policy, micros)         # forward pass over packed micro-batches
backend.backward(micros, loss)                          # forward, loss and backward
norm = backend.clip(max_norm)                           # gradients are summed over all ranks from here on
backend.part.optimizer.step(lr)                         # step
state = backend.weights(dtype)                          # gather: bucket by bucket, by Hugging Face name, to rank 0
store.restore(found, [backend.part])                    # save and restore: tensors by Hugging Face name, too

On a CPU the same weights, batch and number of ranks give bitwise the same result.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from april.learner.checkpoint import CheckpointPart
from april.learner.losses.ranks import Ranks
from april.learner.model import gather_state
from april.learner.packing import MicroBatch
from april.learner.performance import Cost, Seconds, untimed
from april.learner.vision import ImagePacker
from april.learner.weight_parts import WeightTensor
from april.util.pulse import MAIN
from april.weights.base import AdapterWeights, BaseWeights

Loss = Callable[..., Tensor]
"""Function (index of a micro-batch, log-probabilities [K], entropies [K] of its K target tokens, and with a teacher the
divergences from it [K]) -> scalar loss of the micro-batch."""


class Backend(ABC):
    """A policy distributed over ranks. The ranks of `Backend.ranks` hold different parts of a batch."""

    policy: nn.Module
    """This rank's part of the model that `backward` trains."""
    lm: nn.Module
    """A Hugging Face model with the configuration and parameter names of the policy; its parameters may be on the meta
    device."""
    part: CheckpointPart
    """The policy and its optimizer, as stored in a checkpoint."""
    ranks: Ranks
    """Collectives of the data-parallel ranks, among which a batch is divided."""
    cost: Cost
    compute_dtype: str
    """Dtype of activations in forward and backward passes: "float32" or "bfloat16"."""
    adapter: dict[str, Any]
    """Description of the trained adapter, from `lora.describe`."""
    images: ImagePacker | None = None
    """Packs the images of samples; None if the policy takes none."""

    def divide(self, model: nn.Module) -> nn.Module:
        """With context parallelism: change a sharded `model`, in place, so that the ranks with the same index in
        `ranks` divide the tokens of its micro-batches among them. A back end without context parallelism does nothing.
        Returns the model."""
        return model

    @abstractmethod
    def reference(self) -> nn.Module:
        """The reference model: the starting policy, never updated. Collective."""

    def teacher(self, path: Path) -> nn.Module:
        """The model of a folder, never updated, at temperature 1. Collective. Only for a back end whose
        registry entry has `holds_teachers`."""
        raise NotImplementedError(f"{type(self).__name__} holds no teachers")

    def scores(
        self, model: nn.Module, micros: Sequence[MicroBatch], temperature: float | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(log-probabilities, entropies) of the K target tokens of each micro-batch, float32 [K] each, without
        gradients. Collective.

        `model` is the policy or the reference, scored at its own temperature unless another is given. Here and in
        `backward`, ranks with the same index in `ranks` pass the same micro-batches and get the same results.
        """
        for micro in micros:
            MAIN.again()
            with torch.no_grad():
                found = model(micro, temperature)
            yield found

    def backward(self, micros: Iterable[MicroBatch], loss: Loss, seconds: Seconds = untimed) -> None:
        """Accumulate the gradients of the summed losses of the micro-batches; `loss` is called once for each, in order,
        on every rank. `seconds` times the phases "forward_s" and "backward_s". Collective."""
        for index, micro in enumerate(micros):
            MAIN.again()
            with seconds("forward_s"):
                micro_loss = loss(index, *self.policy(micro))
            with seconds("backward_s"):
                micro_loss.backward()

    @abstractmethod
    def clip(self, max_norm: float) -> float:
        """Sum gradients over ranks and scale them to a global L2 norm of at most `max_norm`; returns the norm before.
        There must be gradients. Collective."""

    @abstractmethod
    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Iterate over the weights to publish: (name in the Hugging Face model `lm`, sharded tensor), computed lazily.
        Collective."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Free memory that a forward pass without a backward pass still holds, such as gathered weights."""

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All weights on the CPU of rank 0 by Hugging Face name; {} on other ranks. Collective.

        Tensors are converted to `dtype` before they are sent (None: not converted). A head tied to the embedding is
        left out. An adapter is merged.
        """
        return gather_state(self.lm, self.tensors(), dtype)

    def divisible_weights(self) -> list[WeightTensor] | None:
        """All weights as Hugging Face files have them, of which each rank can gather a part; None if rank 0 has to
        gather them all. An adapter is merged. Collective."""
        return None

    @property
    def adapter_base(self) -> BaseWeights | None:
        """The base model under the adapter that `weights_to_publish` returns; None if that returns all weights."""
        return None

    def weights_to_publish(self, dtype: torch.dtype | None = None) -> Mapping[str, Tensor] | AdapterWeights:
        """Tensors to send to the workers, on rank 0; {} on other ranks. Either all weights, in `dtype` (None: as they
        are trained), or an adapter in float32, from which workers make weights in `dtype`. Collective."""
        return self.weights(dtype)


# --- gradient clipping ------------------------------------------------------------------------------------------------


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients of a sharded model to a global L2 norm of at most `max_norm`; returns the norm before.
    Collective."""
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else [torch.zeros(1)]
    square = torch.linalg.vector_norm(torch.stack(norms)).double().square()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if norm > max_norm and math.isfinite(norm):
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm
