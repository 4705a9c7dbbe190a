"""The broker's side of the conversation with the learner: batches out, what became of them in."""

import logging

from msgspec.structs import replace

from april import wire
from april.broker.books import Books
from april.broker.desks.evaluations import Evaluations
from april.broker.journal.files import Damaged
from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import LedgerError
from april.broker.ledger.places import places_in
from april.broker.ledger.samples import Group, Sample, SampleState
from april.broker.payloads import pack
from april.broker.sessions import Session
from april.broker.telemetry.discards import Discard
from april.broker.telemetry.lives import Lives
from april.data.rows import BadRow
from april.formats.samples import chosen_groups
from april.wire import limits

log = logging.getLogger(__name__)

NONE_YET = -1
PART_BYTES = 1 << 19
"""arrays in one message of a batch, rounded up to whole groups"""
PASS_BYTES = 1 << 19
"""arrays sent to the learner in one pass, so that nobody else waits long"""


Told = tuple[wire.GroupHead, list[wire.Packed]]
"""of a group, what goes into a batch"""


class LearnerDesk:
    def __init__(self, books: Books, evaluations: Evaluations):
        self.books, self.evaluations = books, evaluations
        self.ledger = books.ledger
        self.sessions = books.sessions
        self.came = False
        """a learner has, since the broker started"""
        self.waiting: tuple[Session, wire.Received] | None = None
        """a fetch whose batch does not exist yet, or is not sent to its end"""
        self.sent_groups = 0
        """of the batch that is being sent, and of what was discarded before it"""
        self.chosen: set[int] = set()
        """places of its groups that are kept to be read"""
        self.sendable_from: int | None = None
        """that batch's delivery is on disk once the journal is, up to here"""

    def hello(self, session: Session) -> None:
        self.came = True
        for other in list(self.sessions.by_id.values()):
            if other.role == "learner" and other is not session:
                self.sessions.close(other)
        self.waiting = None
        session.started = self._has_started(session)

    def _has_started(self, session: Session) -> bool:
        """Whether this process is the learner of the current branch, though the broker may have restarted since."""
        return session.uid == self.ledger.learner_uid

    def on_LearnerStart(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        repeated = self._has_started(session) and message.step == self.ledger.consumed
        if not repeated:
            consumed_before = self.ledger.consumed
            try:
                self.ledger.start_learner(message.step, session.uid, message.weights_address, session.key)
            except LedgerError as error:
                return self._refuse(session, received, str(error))
            for step in range(consumed_before, message.step):
                self._step_trained(step, {}, now)
        session.started = True
        self.sessions.broadcast(wire.WeightsAt(message.weights_address, session.key))
        answer = wire.LearnerStarted(self.ledger.branch, self.ledger.frontier)
        self.sessions.send(session, answer, sequence=received.sequence)

    def on_Submit(self, session: Session, received: wire.Received, now: float) -> None:
        if self._refuses_unstarted(session, received):
            return
        try:
            prompts = self.books.prompts.brought(received.message, received.packed)
        except BadRow as error:
            return self._refuse(session, received, str(error))
        for prompt, tokens in prompts:
            if self.ledger.submit(prompt, tokens) is Verdict.GAP:
                brought = self.ledger.prompts_submitted
                return self._refuse(session, received, f"prompt {prompt.row} does not follow {brought} brought ones")
        self.sessions.send(session, wire.Submitted(self.ledger.prompts_submitted), sequence=received.sequence)

    def on_Fetch(self, session: Session, received: wire.Received, now: float) -> None:
        step = received.message.step
        if self._refuses_unstarted(session, received):
            return
        if step not in (self.ledger.consumed, min(self.ledger.consumed + 1, self.ledger.next_step)):
            return self._refuse(session, received, f"batch {step} does not follow {self.ledger.consumed} consumed ones")
        self.waiting, self.sent_groups, self.sendable_from = (session, received), 0, None
        self.answer_fetch()

    def answer_fetch(self) -> None:
        """Send of the batch that the learner waits for as much as goes into a pass, or that there is none."""
        if self.waiting is None:
            return
        session, received = self.waiting
        step = received.message.step
        replayed = step < self.ledger.frontier
        if self.books.run.over and not (replayed and self.ledger.deliveries.get(step)):
            self._finish(session, received)
        elif step in self.ledger.deliveries:
            if self.sendable_from is None:
                self.sendable_from = self.books.journal.end
                self.chosen = self._choose(step) if received.message.samples else set()
            bytes_before = session.sent_bytes
            while session.sent_bytes - bytes_before < PASS_BYTES and self.can_send:
                self._send_part(session, received)
        elif self.books.schedule.wants_prompts(self.ledger):
            self.sessions.send(session, wire.Batch(step, 0, 0, []), sequence=received.sequence)
            self.waiting = None

    def _finish(self, session: Session, received: wire.Received) -> None:
        """What was discarded last says why a run has failed."""
        wanted = received.message.samples and self.books.run.state == "failed"
        told = [self._discard(discard) for discard in self.books.lives.discards.waiting] if wanted else []
        finished = wire.Finished(self.books.run.over, [head for head, _ in told])
        self.sessions.send(session, finished, [one for _, arrays in told for one in arrays], received.sequence)
        self.waiting = None

    def begin_again(self, step: int) -> None:
        """A batch is another than before. Who has a part of it already says hello and asks again."""
        if self.waiting is None or self.waiting[1].message.step != step:
            return
        session, received = self.waiting
        if self.sent_groups:
            self.sessions.close(session)
            reason = "unknown session: the batch has changed; say hello"
            self.sessions.refuse("unknown session", reason, session.data_route, session.id, received.sequence)
            self.waiting = None
        self.sent_groups, self.sendable_from = 0, None

    @property
    def can_send(self) -> bool:
        """Whether there is more of a batch that the learner waits for, and takes now."""
        if self.waiting is None or self.sendable_from is None or self.books.journal.synced < self.sendable_from:
            return False
        return self.sessions.has_credit(self.waiting[0], self.books.credit_bytes)

    def _choose(self, step: int) -> set[int]:
        sessions = [[line.session for line in trained_lines(group)] for group in self.ledger.deliveries[step]]
        rewards = [[one.reward for one in of_group if one.reward is not None] for of_group in sessions]
        return set(chosen_groups(rewards, self.books.config.samples.groups, f"{self.books.config.seed} {step}"))

    def _send_part(self, session: Session, received: wire.Received) -> None:
        """The next groups of the batch, PART_BYTES or one group."""
        step, heads, arrays, size = received.message.step, [], [], 0
        groups: list[Group | Discard] = [*self.ledger.deliveries[step]]
        groups += self.books.lives.discards.of(step) if received.message.samples else []
        first = sent = self.sent_groups
        while sent < len(groups) and size < PART_BYTES:
            group = groups[sent]
            told = self._discard(group) if isinstance(group, Discard) else self._group(group, sent in self.chosen)
            heads.append(told[0])
            arrays += told[1]
            size += sum(len(array.data) for array in told[1])
            sent += 1
        self.sent_groups = sent
        self.sessions.send_at_once(session, wire.Batch(step, first, len(groups), heads), arrays, received.sequence)
        if self.sent_groups == len(groups):
            self.waiting = None

    def _group(self, group: Group, is_kept: bool) -> Told:
        payloads, lines = self.books.payloads, trained_lines(group)
        arrays = [payloads.prompt(group.prompt)]
        for line in lines:
            arrays += payloads.response(line.places)
        head = group_head(group, self.books)
        if is_kept:
            heads = [
                replace(one, chunks=payloads.times(line.places)) for one, line in zip(head.samples, lines, strict=True)
            ]
            head = replace(head, samples=heads)
        return head, arrays

    def _discard(self, discard: Discard) -> Told:
        """Without samples if the journal cannot give them back."""
        payloads, head = self.books.payloads, discard.head
        try:
            arrays, heads = [payloads.prompt(discard.prompt)], []
            for one, chunks in zip(head.samples, discard.chunks, strict=True):
                places = list(places_in(chunks))
                arrays += payloads.response(places)
                heads.append(replace(one, chunks=payloads.times(places)))
        except Damaged:
            return replace(head, samples=[]), [pack("i4", [])]
        return replace(head, samples=heads), arrays

    def on_Consumed(self, session: Session, received: wire.Received, now: float) -> None:
        step = received.message.step
        if len(received.message.metrics) > limits.METRICS:
            raise wire.WireError("more metrics than are kept of a step")
        if self._refuses_unstarted(session, received):
            return
        verdict = self.ledger.consume(step, received.message.discarded)
        if verdict is Verdict.INVALID:
            return self._refuse(session, received, f"batch {step} is not the next one, {self.ledger.consumed}")
        if verdict is Verdict.OK:
            self._step_trained(step, received.message.metrics, now)
        self.sessions.send(session, wire.Accepted(), sequence=received.sequence)

    def _step_trained(self, step: int, metrics: dict[str, float], now: float) -> None:
        record = self.books.recorder.consumed(step, self.ledger, metrics, now)
        self.books.run.summary_is_old = True
        step, reward, tokens = record["step"], record["reward"], record["tokens"]
        log.info("step %d trained: reward %.3f, %d tokens", step, reward, tokens, extra={"step": step})

    def on_BestWanted(self, session: Session, received: wire.Received, now: float) -> None:
        best = self.evaluations.best()
        answer = wire.Best(NONE_YET if best is None else best, self.evaluations.undecided())
        self.sessions.send(session, answer, sequence=received.sequence)

    def on_Durable(self, session: Session, received: wire.Received, now: float) -> None:
        step = received.message.step
        if self._refuses_unstarted(session, received):
            return
        if self.ledger.checkpoint(step, received.message.oldest) is Verdict.INVALID:
            return self._refuse(session, received, f"checkpoint {step} is beyond the {self.ledger.consumed} batches")
        self.sessions.send(session, wire.Accepted(), sequence=received.sequence)

    def _refuses_unstarted(self, session: Session, received: wire.Received) -> bool:
        """Whether the learner has not said which checkpoint it holds: the batches may be another one's by now."""
        if not session.started:
            self._refuse(session, received, "say first which checkpoint you hold")
        return not session.started

    def _refuse(self, session: Session, received: wire.Received, reason: str) -> None:
        log.warning("learner refused: %s", reason, extra={"role": "learner"})
        cause = f"{type(received.message).__name__} out of order"
        self.sessions.refuse(cause, reason, session.data_route, session.id, received.sequence)


def trained_lines(group: Group) -> list[Sample]:
    """What becomes a row of its batch: the samples that have a score, and of those that are sessions each branch in
    which the policy has spoken."""
    done = (line for line in group.lines if line.session.state is SampleState.DONE)
    return [line for line in done if line.own or not line.session.branches]


def group_head(group: Group, books: Books) -> wire.GroupHead:
    samples, life = [sample_head(line, books.lives) for line in trained_lines(group)], books.lives.of(group)
    number, extra = books.prompts.origin(group.row)
    return wire.GroupHead(group.id, group.prompt_tokens, samples, life.opened_at, life.delivered_at, number, extra)


def sample_head(line: Sample, lives: Lives) -> wire.SampleHead:
    reward = line.session.reward
    if reward is None:
        raise ValueError(f"sample {line.group.id}.{line.index} has no reward, and is not done")
    return lives.head_of(line, reward)
