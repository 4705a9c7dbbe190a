"""What a back end is to the trainer: a policy spread over the ranks of the default process group, and its optimizer.

backend = BACKENDS.find(name).build(config, device)     # load: each rank reads its own part of the model's files
found = backend.scores(backend.policy, micros)          # forward: of the tokens of packed micro-batches
backend.backward(micros, loss)                          # forward, loss and backward
norm = backend.clip(most)                               # gradients are those of all ranks from here on
backend.part.optimizer.step()                           # step
state = backend.weights(dtype)                          # gather: bucket by bucket, by Hugging Face name, to rank 0
store.restore(found, [backend.part])                    # save and restore: tensors by Hugging Face name, too

The same weights, batch and ranks give bitwise the same on a CPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from april.learner.checkpoint import Part
from april.learner.flops import Cost
from april.learner.losses.ranks import Ranks
from april.learner.model import full_state
from april.learner.packing import MicroBatch
from april.learner.phases import Seconds, untimed
from april.processes.pulse import MAIN
from april.weights.base import Adapted

Loss = Callable[[int, Tensor, Tensor], Tensor]
"""of a micro-batch's place among those given, and of log-probability and entropy of each of its targets"""


class Backend(ABC):
    policy: nn.Module
    """what `backward` trains"""
    lm: nn.Module
    """a Hugging Face model of the same configuration and names; its parameters need have no memory"""
    part: Part
    """the policy in a checkpoint, with its optimizer"""
    ranks: Ranks
    """the places that a batch is divided among"""
    cost: Cost
    computes_in: str
    """the type of activations: float32, bfloat16"""
    adapter: dict[str, Any]
    """that is trained in the model's place, as `lora.describe` says it"""

    @abstractmethod
    def reference(self) -> nn.Module:
        """The starting policy, never updated. Collective."""

    def scores(
        self, model: nn.Module, micros: Sequence[MicroBatch], temperature: float | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(log-probability, entropy) of each target of each micro-batch, float32 [K], without gradients. Collective.

        They are those of `model`, the policy or the reference, at its own temperature, unless another is given. All
        ranks of one place in `ranks` give the same micro-batches, and get all that is found; here and in `backward`.
        """
        for micro in micros:
            MAIN.again()
            with torch.no_grad():
                found = model(micro, temperature)
            yield found

    def backward(self, micros: Sequence[MicroBatch], loss: Loss, seconds: Seconds = untimed) -> None:
        """Add to the policy's gradients that of the sum of what `loss` makes of the micro-batches, which it is called
        with once each, in their order, on every rank. Collective."""
        for place, micro in enumerate(micros):
            MAIN.again()
            with seconds("forward_s"):
                share = loss(place, *self.policy(micro))
            with seconds("backward_s"):
                share.backward()

    @abstractmethod
    def clip(self, most: float) -> float:
        """Scale gradients, of which there are some, to a global norm of at most `most`; the norm before that.
        Collective."""

    @abstractmethod
    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The weights as they are published, sharded, by their names in `lm`, as they are asked for. Collective."""

    @abstractmethod
    def rest(self) -> None:
        """Let go of what a forward pass without a backward pass still holds."""

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All weights, on the CPU of rank 0 under their Hugging Face names; {} elsewhere. Collective.

        They are converted to `dtype` before they travel (None: as they are). A head that is tied to the embedding is
        left out. An adapter is in the weights that it belongs to.
        """
        return full_state(self.lm, self.tensors(), dtype)

    def published(self, dtype: torch.dtype | None = None) -> Mapping[str, Tensor] | Adapted:
        """What workers are sent of the same, on rank 0. Collective."""
        return self.weights(dtype)
