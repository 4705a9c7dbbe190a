"""What goes through the model at a time, and what the loss and the critic need of it."""

from dataclasses import dataclass

from torch import Tensor

from april.learner.critic import Judged
from april.learner.losses.columns import log_ratio
from april.learner.objective import OfBatch, ResponseTokens
from april.learner.packing import MicroBatch


@dataclass(frozen=True, eq=False)
class Micro:
    """What goes through the model at a time."""

    indices: list[int]
    """of its samples among those prepared"""
    packed: MicroBatch
    tokens: ResponseTokens | None
    """what the loss needs of them; None for a dummy"""
    before: Tensor | None = None
    """float32 [K]: their log-probabilities under the weights before the first optimizer step, where those are wanted"""
    reference: Tensor | None = None
    """float32 [K]: and under the reference, where the loss wants those"""
    judged: Judged | None = None
    """what a critic says of them"""
    given: OfBatch | None = None
    """what the loss takes from all tokens of the batch"""


@dataclass(frozen=True, eq=False)
class Measured:
    """The `Loss` whose gradient is that of a response, which adds up what is known of it in `log_ratio`."""

    passes: list[Micro]
    log_ratio: Tensor

    def __call__(self, place: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        tokens = self.passes[place].tokens
        if tokens is None:
            return 0.0 * logprobs.sum()
        self.log_ratio.add_(log_ratio(logprobs.detach(), tokens.behaviour_logprobs).sum())
        return logprobs.sum()
