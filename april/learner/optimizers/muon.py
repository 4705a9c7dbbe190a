"""Muon for the matrices inside the layers, AdamW for everything else."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from april.config import LearnerSection
from april.learner.optimizers.adamw import MOMENTS, fused_adamw
from april.learner.optimizers.base import STEP, PartOptimizer, Trained, is_matrix
from april.util.errors import refuse

MOMENTUM = ("momentum_buffer",)
"""Name of the decayed sum of a matrix's gradients."""


class ShardedMuon(PartOptimizer):
    """Orthogonalised momentum of torch, scaled so that `learner.lr` means what it means for AdamW ("Muon is Scalable
    for LLM Training", arXiv 2502.16982). It takes whole matrices, which ranks gather from each other in a step."""

    def __init__(self, trained: Trained, lr: float, section: LearnerSection):
        super().__init__(trained, lr, section)
        matrices = [(name, parameter) for name, parameter in trained if is_matrix(name, parameter)]
        for name, parameter in matrices:
            if isinstance(parameter, DTensor) and len(parameter) < parameter.device_mesh.size():
                refuse(
                    "learner.optimizer",
                    "muon",
                    f"divides the {len(parameter)} rows of {name} over more ranks than that",
                    "use fewer ranks, or adamw",
                )
        inner = [parameter for _, parameter in matrices]
        inner_ids = {id(parameter) for parameter in inner}
        outer = [parameter for parameter in self.parameters if id(parameter) not in inner_ids]
        self.optimizers: list[torch.optim.Optimizer] = []
        """Torch's optimizers, which have all parameters among them."""
        if inner:
            decay = section.weight_decay
            self.optimizers.append(torch.optim.Muon(inner, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        if outer:
            self.optimizers.append(fused_adamw(outer, lr, section))

    def step(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = next(
            (each.state[parameter] for each in self.optimizers if parameter in each.state), {}
        )
        return {name: value for name, value in state.items() if name != STEP}

    def restore(self, steps: int) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()
            is_muon = isinstance(optimizer, torch.optim.Muon)
            for parameter in (each for group in optimizer.param_groups for each in group["params"] if steps):
                names = MOMENTUM if is_muon else MOMENTS
                state: dict[str, Tensor] = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
                state |= {} if is_muon else {STEP: torch.tensor(float(steps), device=parameter.device)}
                optimizer.state[parameter] = state

    def tensors(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from state.values()
