"""A micro-batch with the inputs of its loss, and the loss that measures gradient norms."""

from dataclasses import dataclass

from torch import Tensor

from april.learner.losses.columns import log_ratio
from april.learner.objective import BatchContext, ResponseTokens
from april.learner.packing import MicroBatch


@dataclass(frozen=True, eq=False)
class TrainMicroBatch:
    """A packed micro-batch with K sampled tokens, and the inputs of its loss."""

    indices: list[int]
    """Indices in `Prepared.samples` of the micro-batch's samples."""
    packed: MicroBatch
    tokens: ResponseTokens | None
    """Inputs of the loss for the sampled tokens; None for a dummy micro-batch."""
    context: BatchContext | None = None
    """Loss inputs computed over all tokens of the batch; None if the configured loss has none."""


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
