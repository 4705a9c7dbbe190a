"""A batch as a rank trains it: advantages, plan, and micro-batches on the rank's device."""

from dataclasses import dataclass

from april.learner.conversations import ConversationMicroBatch
from april.learner.objective import Prepared, TrainMicroBatch


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch prepared for this rank: advantages, plan, and micro-batches on its device."""

    prepared: Prepared
    minibatches: list[list[TrainMicroBatch]]
    """Micro-batches of each optimizer step of an epoch, the same number on every rank; empty if no sample has a
    gradient."""
    conversations: list[list[ConversationMicroBatch]]
    """Micro-batches of conversations in each optimizer step of an epoch, the same number on every rank."""
    operations: float
    """Floating-point operations of the step, summed over all ranks."""
    prepare_s: float
    """Wall time of `Trainer.prepare`, seconds."""

    @property
    def micros(self) -> list[TrainMicroBatch]:
        return [micro for minibatch in self.minibatches for micro in minibatch]

    def split_by_minibatch(self, micros: list[TrainMicroBatch]) -> list[list[TrainMicroBatch]]:
        """Split `micros`, updated copies of this batch's micro-batches in order, by minibatch."""
        rest = iter(micros)
        return [[next(rest) for _ in minibatch] for minibatch in self.minibatches]
