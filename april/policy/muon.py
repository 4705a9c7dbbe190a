"""Muon in float32, for the warm start's small matrices.

`torch.optim.Muon` orthogonalises in bfloat16, which a CPU without AVX512-BF16 or AMX multiplies up to thirty times
slower than float32: a warm start would take five minutes instead of one.
"""

from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, chosen for the steepest slope at zero (Jordan et al. 2024,
kellerjordan.github.io/posts/muon)."""


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with an orthogonalised update (Jordan et al. 2024); every parameter is a float32 matrix."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum=0.95, iterations=5):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "iterations": iterations})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["average"] = torch.zeros_like(matrix)
                average = state["average"]
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalised(matrix.grad.lerp(average, group["momentum"]), group["iterations"])
                shape_scale = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
                matrix.sub_(update, alpha=group["lr"] * shape_scale)


def orthogonalised(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Approximately U V^T of the singular value decomposition U S V^T: all singular values become about 1."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.size(0) <= matrix.size(1) else wide.T
