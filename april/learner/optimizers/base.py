"""Interface of an optimizer of sharded parameters, and one that steps each rank's shards as ordinary tensors.

optimizer = OPTIMIZERS.find(section.optimizer)(trained, section.lr, section)
optimizer.step(lr)
optimizer.moments(parameter)     # what a checkpoint keeps of it, in fp32 and sharded like the parameter
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from april.config import LearnerSection

STEP = "step"
"""Key of an optimizer's state for the number of steps that it has made."""
LEAST_SIDE = 16
"""Fewest rows, and fewest columns, of a matrix that an optimizer of whole matrices steps; smaller ones, such as a
gate's or an adapter's, are stepped element by element."""
Trained = Sequence[tuple[str, nn.Parameter]]
"""Pairs (name, parameter) of the trained parameters of the policy, or of the critic."""


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether an optimizer of whole matrices, such as Muon, steps a parameter as a matrix: it has two dimensions of at
    least LEAST_SIDE each, and is in one of the model's layers, by its `name`. All others are stepped element by
    element."""
    return ".layers." in name and parameter.ndim == 2 and min(parameter.shape) >= LEAST_SIDE


class PartOptimizer(ABC):
    """Optimizer of the policy or the critic. Methods are collective, except `zero_grad` and `tensors`."""

    def __init__(self, trained: Trained, lr: float, section: LearnerSection):
        self.parameters = [parameter for _, parameter in trained]
        self.name, self.master_weights = section.optimizer, section.master_weights

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @abstractmethod
    def step(self, lr: float) -> None:
        """Change the parameters by their gradients, at the learning rate `lr`."""

    @abstractmethod
    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """State of a parameter that goes into a checkpoint: tensors of its shape, by name, sharded like it; {} before
        the first step. After `restore` they exist, and values are loaded into them."""

    @abstractmethod
    def restore(self, steps: int) -> None:
        """Drop all state, and allocate the moments of an optimizer that has made `steps` steps; a checkpoint is loaded
        into them."""

    def loaded(self) -> None:  # noqa: B027
        """Take over the values that were loaded, after `restore`, into the tensors that `moments` gives. Does nothing
        if the optimizer computes with these tensors themselves."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the optimizer keeps, on the learner's device or on the host."""


class ShardOptimizer(PartOptimizer):
    """Steps this rank's shards by an optimizer of ordinary tensors in fp32. Where weights are on an accelerator and the
    step on the host, or weights are in bf16, it steps copies of a parameter and its gradient, one parameter after the
    other."""

    names: Sequence[str]
    """Names of the tensors of a parameter's shape in the inner optimizer's state."""
    counts = True
    """Whether the inner optimizer's state has the number of steps, as a tensor `step`."""

    def __init__(self, trained: Trained, lr: float, section: LearnerSection):
        super().__init__(trained, lr, section)
        self.on_host, self.steps = section.optimizer_on_host, 0
        self.copies = self.on_host or self.master_weights == "bf16"
        self.shards = {
            parameter: nn.Parameter(torch.empty(0, device="cpu" if self.on_host else local(parameter).device))
            for parameter in self.parameters
            if local(parameter).numel()
        }
        """Shards that the inner optimizer steps, by parameter, without parameters of which this rank holds nothing."""
        self.inner = self.build(list(self.shards.values()), lr, section)

    @abstractmethod
    def build(self, shards: Iterable[nn.Parameter], lr: float, section: LearnerSection) -> torch.optim.Optimizer:
        """Make the inner optimizer, which steps this rank's `shards` as ordinary tensors."""

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.steps += 1
        for number, (parameter, shard) in enumerate(self.shards.items()):
            shard.data = self._placed(parameter)
            # without a gradient it is 0, as the steps of all parameters are counted once
            shard.grad = torch.zeros_like(shard) if parameter.grad is None else self._placed(parameter.grad)
            if self.copies:
                self.inner.step()
                held = local(parameter)
                seed = (self.steps, number, dist.get_rank() if dist.is_initialized() else 0)
                held.copy_(shard if held.dtype == shard.dtype else rounded_at_random(shard, seed))
                shard.data, shard.grad = shard.data.new_empty(0), None
        if not self.copies:
            self.inner.step()
        self._release()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if not self.inner.state:
            return {}
        state = self.state_of(parameter) or self.zeros(self._placed(parameter))
        return {name: sharded_like(parameter, state[name]) for name in self.names}

    def restore(self, steps: int) -> None:
        self.inner.state.clear()
        self.steps = steps
        for parameter, shard in self.shards.items() if steps else ():
            placed = self._placed(parameter)
            count = {STEP: torch.tensor(float(steps), device=placed.device)} if self.counts else {}
            self.inner.state[shard] = count | self.zeros(placed)

    def zeros(self, shard: Tensor) -> dict[str, Tensor]:
        """Zero moments, by name, of the shape of `shard`, as before the first step."""
        return {name: torch.zeros_like(shard) for name in self.names}

    def tensors(self) -> Iterator[Tensor]:
        for state in self.inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of the inner optimizer for this rank's shard of a parameter; {} if it has none."""
        shard = self.shards.get(parameter)
        return self.inner.state[shard] if shard is not None and shard in self.inner.state else {}

    def _placed(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a tensor in fp32, on the device that computes the step: the shard itself, or a copy."""
        return (local(tensor).cpu() if self.on_host else local(tensor)).float()

    def _release(self) -> None:
        """Drop the shards' copies of weights and gradients, so that none are held between two steps."""
        for shard in self.shards.values():
            shard.data, shard.grad = shard.data.new_empty(0), None


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor: it shares the tensor's memory, and is detached from autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def rounded_at_random(values: Tensor, seed: tuple[int, ...]) -> Tensor:
    """fp32 values in bfloat16, each rounded up or down with the chance that makes the mean right ("Revisiting BFloat16
    Training", arXiv 2010.06192, section 3); the same `seed` rounds in the same way."""
    generator = torch.Generator(values.device).manual_seed(hash(seed) & (1 << 63) - 1)
    below = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return ((values.view(torch.int32) + below) & -(1 << 16)).view(torch.float32).bfloat16()


def sharded_like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """A tensor with the sharding of `parameter`, on the device of `shard`, which is this rank's shard of it."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh = parameter.device_mesh
    if mesh.device_type != shard.device.type:
        mesh = DeviceMesh(shard.device.type, mesh.mesh)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
