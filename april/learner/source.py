"""The learner's end of the conversation with the broker: fetches batches, reports what became of them."""

import uuid
from collections.abc import Callable

import numpy as np

from april import wire
from april.client import BrokerConnection, BrokerRefused
from april.learner.batch import Batch, TrainSample
from april.security.keys import Keys


class BrokerSource:
    """Implements `april.learner.loop.Source` over a broker connection, for rank 0."""

    def __init__(self, address: str, weights_address: str, patience_s: float, keys: Keys | None = None):
        self.weights_address = weights_address
        self.connection = BrokerConnection(address, "learner", "learner", uuid.uuid4().hex, patience_s, keys)
        self.connection.hello(leases=[])

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        [answer] = self._ask(wire.LearnerStart(checkpoint_step, self.weights_address))
        return answer.message.branch, answer.message.frontier

    def fetch(self, step: int) -> Batch | None:
        parts = self._ask(wire.Fetch(step), is_whole)
        if isinstance(parts[0].message, wire.Finished):
            return None
        by_place = {part.message.first: part for part in parts}
        ordered = [by_place[first] for first in sorted(by_place)]
        return Batch(step, [group for part in ordered for group in to_groups(part.message, part.arrays)])

    def consumed(self, step: int, metrics: dict[str, float]) -> None:
        self._ask(wire.Consumed(step, {name: float(value) for name, value in metrics.items()}))

    def durable(self, step: int, oldest: int) -> None:
        self._ask(wire.Durable(step, oldest))

    def close(self) -> None:
        self.connection.send(wire.Goodbye())
        self.connection.close()

    def _ask(
        self, message: wire.Message, whole: Callable[[list[wire.Received]], bool] = lambda answers: True
    ) -> list[wire.Received]:
        answers = self.connection.request_parts(message, whole)
        if isinstance(answers[0].message, wire.Refused):
            raise BrokerRefused(f"the broker refuses: {answers[0].message.reason}")
        return answers


def is_whole(answers: list[wire.Received]) -> bool:
    """Whether all parts of the answer to Fetch have arrived; one that was asked for twice may come twice."""
    last = answers[-1].message
    if not isinstance(last, wire.Batch):
        return True
    sizes = {answer.message.first: len(answer.message.groups) for answer in answers}
    return sum(sizes.values()) == last.total


def to_groups(message: wire.Batch, arrays: list[np.ndarray]) -> list[list[TrainSample]]:
    """Put the arrays of a batch message together with what its heads say of them."""
    groups, rest = [], iter(arrays)
    for group in message.groups:
        prompt = next(rest)
        samples = [
            TrainSample(
                tokens=np.concatenate([prompt, next(rest)]),
                prompt_tokens=group.prompt_tokens,
                logprobs=next(rest),
                reward=head.reward,
                segments=tuple(head.segments),
            )
            for head in group.samples
        ]
        groups.append(samples)
    return groups
