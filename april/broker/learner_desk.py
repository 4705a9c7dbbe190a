"""The broker's side of the conversation with the learner: batches out, what became of them in."""

import logging
from typing import TYPE_CHECKING

import numpy as np

from april import limits, wire
from april.broker.ledger import LedgerError, Verdict
from april.broker.samples import Group, Sample, SampleState
from april.broker.sessions import Session

if TYPE_CHECKING:
    from april.broker.service import Service

log = logging.getLogger(__name__)


class LearnerDesk:
    def __init__(self, service: "Service"):
        self.service = service
        self.ledger = service.ledger
        self.sessions = service.sessions
        self.weights_address = ""
        self.weights_key = ""
        """the learner's public key, by which workers recognise its publisher"""
        self.waiting: tuple[Session, wire.Received] | None = None
        """a fetch whose batch does not exist yet"""

    def hello(self, session: Session) -> None:
        for other in list(self.sessions.by_id.values()):
            if other.role == "learner" and other is not session:
                self.sessions.close(other)
        self.waiting = None

    def on_LearnerStart(self, session: Session, received: wire.Received, now: float) -> None:
        consumed_before = self.ledger.consumed
        try:
            self.ledger.start_learner(received.message.step)
        except LedgerError as error:
            return self._refuse(session, received, str(error))
        for step in range(consumed_before, received.message.step):
            self.service.step_trained(step, {}, now)
        session.started = True
        self.weights_address = received.message.weights_address
        self.weights_key = session.key
        self.sessions.broadcast(wire.WeightsAt(self.weights_address, self.weights_key))
        answer = wire.LearnerStarted(self.ledger.branch, self.ledger.frontier)
        self.sessions.send(session, answer, sequence=received.sequence)

    def on_Fetch(self, session: Session, received: wire.Received, now: float) -> None:
        step = received.message.step
        if not session.started:
            return self._refuse(session, received, "say first which checkpoint you hold")
        if step != self.ledger.consumed:
            return self._refuse(session, received, f"batch {step} does not follow {self.ledger.consumed} consumed ones")
        self.waiting = (session, received)
        self.answer_fetch()

    def answer_fetch(self) -> None:
        """Send the batch that the learner waits for, or that there is none, as soon as that is known."""
        if self.waiting is None:
            return
        session, received = self.waiting
        step = received.message.step
        if self.service.over:
            self.sessions.send(session, wire.Finished(self.service.over), sequence=received.sequence)
        elif step in self.ledger.deliveries:
            groups = self.ledger.deliveries[step]
            batch = wire.Batch(step, [group_head(group) for group in groups])
            arrays = [array for group in groups for array in self._group_arrays(group)]
            self.sessions.send(session, batch, arrays, received.sequence)
        else:
            return
        self.waiting = None

    def _group_arrays(self, group: Group) -> list[np.ndarray]:
        prompt = np.frombuffer(self.service.journal.read(group.prompt).prompt, "<i4")
        ids, logprobs = [], []
        for sample in done_samples(group):
            ids.append(prompt)
            for chunk_ids, chunk_logprobs in self.service.read_chunks(sample):
                ids.append(chunk_ids)
                logprobs.append(chunk_logprobs)
        return [np.concatenate(ids), np.concatenate(logprobs)]

    def on_Consumed(self, session: Session, received: wire.Received, now: float) -> None:
        step = received.message.step
        if len(received.message.metrics) > limits.METRICS:
            raise wire.WireError("more metrics than are kept of a step")
        verdict = self.ledger.consume(step)
        if verdict is Verdict.INVALID:
            return self._refuse(session, received, f"batch {step} is not the next one, {self.ledger.consumed}")
        if verdict is Verdict.OK:
            self.service.step_trained(step, received.message.metrics, now)
        self.sessions.send(session, wire.Accepted(), sequence=received.sequence)

    def on_Durable(self, session: Session, received: wire.Received, now: float) -> None:
        step = received.message.step
        if self.ledger.checkpoint(step) is Verdict.INVALID:
            return self._refuse(session, received, f"checkpoint {step} is beyond the {self.ledger.consumed} batches")
        self.sessions.send(session, wire.Accepted(), sequence=received.sequence)

    def _refuse(self, session: Session, received: wire.Received, reason: str) -> None:
        log.warning("learner refused: %s", reason)
        cause = f"{type(received.message).__name__} out of order"
        self.sessions.refuse(cause, reason, session.data_route, 0, session.id, received.sequence)


def done_samples(group: Group) -> list[Sample]:
    return [sample for sample in group.samples if sample.state is SampleState.DONE]


def group_head(group: Group) -> wire.GroupHead:
    samples = [
        wire.SampleHead(sample.index, sample.length, sample.reward, sample.finish_reason, sample.segments)
        for sample in done_samples(group)
    ]
    return wire.GroupHead(group.id, group.prompt_tokens, samples)
