"""The gradient norm of each response's log-probability, from which advantage estimators with the attribute
`needs_norms` compute advantages.

A backward pass sums the gradients of all its tokens over all ranks, so every response has a pass of its own, with all
rows (forks) of the sample.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from april.learner.backends.backend import Backend
from april.learner.losses.columns import bounded, log_ratio
from april.learner.objective import TrainMicroBatch
from april.util.pulse import MAIN


@dataclass(frozen=True, eq=False)
class ResponseGradientLoss:
    """A `Loss` whose gradient is that of a response's log-probability; sums the response's log(pi / mu) into
    `log_ratio`, a scalar tensor."""

    micros: list[TrainMicroBatch]
    log_ratio: Tensor

    def __call__(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        tokens = self.micros[index].tokens
        if tokens is None:
            return 0.0 * logprobs.sum()
        self.log_ratio.add_(log_ratio(logprobs.detach(), tokens.behaviour_logprobs).sum())
        return logprobs.sum()


def response_norms(
    backend: Backend,
    device: torch.device,
    responses: list[list[int]],
    micros_of: Callable[[list[int]], list[TrainMicroBatch]],
) -> tuple[Tensor, Tensor]:
    """Log-ratio log(pi / mu) and squared gradient norm of each of S responses, float64 [S] each, on the CPU.
    Collective.

    `responses`: indices of each response's rows in the prepared batch; `micros_of(rows)`: this rank's micro-batches of
    such rows.
    """
    log_ratios, squares = torch.zeros(2, len(responses), dtype=torch.float64, device=device)
    MAIN.at("measuring gradient norms")
    for index, rows in enumerate(responses):
        backend.part.optimizer.zero_grad()
        micros = micros_of(rows)
        backend.backward([micro.packed for micro in micros], ResponseGradientLoss(micros, log_ratios[index]))
        squares[index] = backend.clip(math.inf) ** 2 if micros else 0.0
    return bounded(backend.ranks.total(log_ratios)).cpu(), squares.cpu()
