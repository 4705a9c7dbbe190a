"""Muon for the matrices inside the layers, AdamW for everything else."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from april.config import LearnerSection
from april.learner.optimizers.adamw import MOMENTS, fused_adamw
from april.learner.optimizers.base import STEP, PartOptimizer, Trained, is_matrix
from april.util.errors import refuse

MOMENTUM = ("momentum_buffer",)
"""Name, in the state of torch's Muon, of the decayed sum of a matrix's gradients."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, chosen for the steepest slope at zero (Jordan et al. 2024,
kellerjordan.github.io/posts/muon)."""


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
        """Torch's Muon for the matrices inside the layers and AdamW for all other parameters; one that has no
        parameters is left out."""
        if inner:
            kind = MuonInFloat32 if inner[0].device.type == "cpu" else torch.optim.Muon
            self.optimizers.append(
                kind(inner, lr=lr, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw")
            )
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


class MuonInFloat32(torch.optim.Muon):
    """Torch's Muon with its matrix products in float32: a CPU takes many times as long for them in bfloat16."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            momentum, adjust, decay = group["momentum"], LR_ADJUSTMENTS[group["adjust_lr_fn"]], group["weight_decay"]
            for matrix in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                average = state["momentum_buffer"]
                average.lerp_(matrix.grad, 1 - momentum)
                update = orthogonalised_over_ranks(matrix.grad.lerp(average, momentum), group["ns_steps"])
                matrix.mul_(1 - group["lr"] * decay)
                matrix.add_(update, alpha=-group["lr"] * adjust(*matrix.shape))


LR_ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}
"""Function (rows, columns of a matrix) -> factor on its learning rate, by the value of torch.optim.Muon's
`adjust_lr_fn`."""


def orthogonalised_over_ranks(matrix: Tensor, iterations: int) -> Tensor:
    """`orthogonalised` of a matrix that may be sharded over ranks: each rank gathers the whole matrix, and keeps its
    shard of the result. Collective if sharded."""
    if not isinstance(matrix, DTensor):
        return orthogonalised(matrix, iterations)
    whole = orthogonalised(matrix.full_tensor(), iterations)
    return distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """Approximately U V^T of the singular value decomposition U S V^T: all singular values become about 1.
    `iterations`: number of Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.size(0) <= matrix.size(1) else wide.T
