"""The learner's end of the conversation with the broker: fetches batches, reports what became of them."""

import uuid

import numpy as np

from april import wire
from april.client import BrokerConnection
from april.learner.batch import Batch, TrainSample
from april.security.keys import Keys

ANSWER_S = 60.0
"""longest wait for an answer that needs no work by others"""


class LearnerRefused(RuntimeError):
    """The broker refuses what the learner asks; the text says why."""


class BrokerSource:
    """Implements `april.learner.loop.Source` over a broker connection, for rank 0."""

    def __init__(self, address: str, weights_address: str, keys: Keys | None = None):
        self.weights_address = weights_address
        self.connection = BrokerConnection(address, "learner", "learner", uuid.uuid4().hex, keys)
        self.connection.hello(leases=[])

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        answer = self._ask(wire.LearnerStart(checkpoint_step, self.weights_address), ANSWER_S)
        return answer.message.branch, answer.message.frontier

    def fetch(self, step: int) -> Batch | None:
        answer = self._ask(wire.Fetch(step), None)
        return None if isinstance(answer.message, wire.Finished) else to_batch(answer.message, answer.arrays)

    def consumed(self, step: int, metrics: dict[str, float]) -> None:
        self._ask(wire.Consumed(step, {name: float(value) for name, value in metrics.items()}), ANSWER_S)

    def durable(self, step: int) -> None:
        self._ask(wire.Durable(step), ANSWER_S)

    def close(self) -> None:
        self.connection.send(wire.Goodbye())
        self.connection.close()

    def _ask(self, message: wire.Message, timeout_s: float | None) -> wire.Received:
        answer = self.connection.request(message, timeout_s)
        if isinstance(answer.message, wire.Refused):
            raise LearnerRefused(answer.message.reason)
        return answer


def to_batch(message: wire.Batch, arrays: list[np.ndarray]) -> Batch:
    """Cut the joined arrays of a batch message into its samples."""
    groups = []
    for group, ids, logprobs in zip(message.groups, arrays[::2], arrays[1::2], strict=True):
        samples, at_id, at_logprob = [], 0, 0
        for head in group.samples:
            length = group.prompt_tokens + head.response_tokens
            samples.append(
                TrainSample(
                    tokens=ids[at_id : at_id + length],
                    prompt_tokens=group.prompt_tokens,
                    logprobs=logprobs[at_logprob : at_logprob + head.response_tokens],
                    reward=head.reward,
                    segments=tuple(head.segments),
                )
            )
            at_id, at_logprob = at_id + length, at_logprob + head.response_tokens
        groups.append(samples)
    return Batch(message.step, groups)
