"""What the broker says to those who hold leases, workers and scorers alike: coming, going, scores, work handed back."""

import logging
import math

from april import wire
from april.broker.books import Books
from april.broker.desks.grants import send_grant
from april.broker.ledger.admission import Verdict
from april.broker.ledger.samples import Lease, Sample
from april.broker.sessions import Session
from april.wire import limits

log = logging.getLogger(__name__)

NOT_CURRENT = "the lease is not current"
TOO_MANY = f"a session has at most {wire.BRANCHES} branches"


class HolderDesk:
    def __init__(self, books: Books):
        self.books = books
        self.config = books.config
        self.ledger = books.ledger
        self.sessions = books.sessions
        self.recorder = books.recorder
        self._terms = math.nan, 0.0, 0.0
        """of the leases that were granted last: when that was, when they expire, how long they can be renewed"""

    def mark(self, session: Session, instant: str, now: float) -> None:
        """Note an instant of a holder's life: joined, lost."""

    def lease(self, sample: Sample, session: Session, step: int, now: float) -> Lease:
        """Lease a sample to a holder at policy step `step`, and tell it so."""
        if self._terms[0] != now:  # there are a great many leases: those of one pass share their instants
            self._terms = now, now + self.config.broker.lease_s, now + self.config.broker.max_run_s
        lease = self.ledger.lease(sample, session.uid, step, *self._terms[1:])
        send_grant(self.books, session, lease)
        return lease

    # --- coming and going -----------------------------------------------------------------------------------

    def hello(self, session: Session, hello: wire.Hello, now: float) -> list[int]:
        """Take in a holder; returns those of its leases that are lost. A namesake of another process is dead."""
        for other in self.sessions.holders():
            if other is not session and other.uid == hello.uid:
                self.sessions.close(other)
            elif other is not session and (other.role, other.name) == (hello.role, hello.name):
                self.sessions.send_control(other, wire.Stop(f"another {hello.role} has taken the name {hello.name}"))
                self.lose(other, "its successor has arrived", now)
        held = {lease_id for lease_id in hello.leases if self._holds(hello.uid, lease_id)}
        self.ledger.renew(list(held), now + self.config.broker.lease_s)
        for lease in self.leases_of(hello.uid):
            if lease.id not in held:
                self.ledger.end_lease(lease.id, "lost", "its worker came back without it", now)
        self.mark(session, "joined", now)
        return [lease_id for lease_id in hello.leases if lease_id not in held]

    def welcomed(self, session: Session) -> None:
        """Say what a holder has to know from the beginning. It hears nothing that comes before its welcome."""

    def lose(self, session: Session, why: str, now: float) -> None:
        """A holder is gone: all that it held waits for another."""
        leases = self.leases_of(session.uid)
        who, ids = f"{session.role} {session.name}", {"worker": session.name}
        log.warning("%s is lost (%s); %d leases wait for another", who, why, len(leases), extra=ids)
        for lease in leases:
            self.ledger.end_lease(lease.id, "lost", f"{who} was lost: {why}", now)
        self.mark(session, "lost", now)
        self.sessions.close(session)

    def goodbye(self, session: Session) -> None:
        for lease in self.leases_of(session.uid):
            self.ledger.end_lease(lease.id, "leave")
        self.sessions.close(session)

    def cancel(self, session: Session, lease_id: int) -> None:
        """Tell it to drop a sample whose lease has ended without it."""
        self.sessions.send_control(session, wire.Cancel([lease_id]))

    def leases_of(self, uid: str) -> list[Lease]:
        return [self.ledger.leases[lease_id] for lease_id in self.ledger.held.get(uid, ())]

    def _holds(self, uid: str, lease_id: int) -> bool:
        lease = self.ledger.leases.get(lease_id)
        return lease is not None and lease.worker == uid

    # --- what holders report --------------------------------------------------------------------------------

    def on_Heartbeat(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if len(message.leases) > self.config.security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        if message.slots and len(message.slots.tool) > self.config.security.max_leases:
            raise wire.WireError("more leases at a tool than a worker may hold")
        session.slots = message.slots or session.slots
        tally = self.sessions.tallies[session.uid]
        tally.emitted = max(tally.emitted, message.emitted_tokens)
        mine = {lease_id for lease_id in message.leases if self._holds(session.uid, lease_id)}
        self.ledger.renew(list(mine), now + self.config.broker.lease_s)
        self.sessions.answer_heartbeat(session, [lease_id for lease_id in message.leases if lease_id not in mine])

    def on_Report(self, session: Session, received: wire.Received, now: float) -> None:
        """New tokens first, then the leases that end behind them."""
        if len(received.message.closings) > limits.REPORT_CLOSINGS:
            raise wire.WireError(f"a report ends at most {limits.REPORT_CLOSINGS} leases")
        if received.packed:
            self.take_rows(session, received.packed, now)
        for closing in received.message.closings:
            if not self._holds(session.uid, closing.lease_id):
                self.refuse(session, closing.lease_id, NOT_CURRENT)
            elif isinstance(closing, wire.Scored):
                self._take_score(session, closing, now)
            elif isinstance(closing, wire.Closed):
                self._close_agent(session, closing, now)
            else:
                self._take_back(session, closing, now)

    def take_rows(self, session: Session, packed: list[wire.Packed], now: float) -> None:
        """The new tokens of a report."""
        raise wire.WireError(f"a {session.role} generates nothing")

    def _take_score(self, session: Session, scored: wire.Scored, now: float) -> None:
        lease = self.ledger.leases[scored.lease_id]
        fault = fault_of_score(scored, len(lease.samples))
        if fault:
            return self.refuse(session, lease.id, f"bad score: {fault}")
        if lease.agent and lease.sample.group.together:
            return self._close_agent(session, wire.Closed(lease.id, scored.superseded, scored.state), now)
        if lease.on_group:
            verdict = self.ledger.score_group(lease.id, scored.rewards, scored.details)
        else:
            verdict = self.ledger.score(lease.id, scored.rewards[0], scored.details[0], scored.superseded)
        if verdict is Verdict.GAP:
            return self.sessions.ask_again(session, lease.id, lease.sample.length)
        if verdict is Verdict.INVALID:
            return self._agent_said_nothing(session, lease, now)
        self.sessions.acknowledge(session, lease.id)

    def _close_agent(self, session: Session, closed: wire.Closed, now: float) -> None:
        lease = self.ledger.leases[closed.lease_id]
        if not lease.agent:
            return self.refuse(session, lease.id, "bad closing: the lease is no session")
        if len(closed.superseded) > wire.BRANCHES:
            return self.refuse(session, lease.id, f"bad closing: {TOO_MANY}")
        if len(closed.state) > limits.LEFT_BYTES:
            return self.refuse(session, lease.id, f"bad closing: a state has at most {limits.LEFT_BYTES} bytes")
        if self.ledger.close_agent(lease.id, closed.superseded, closed.state) is Verdict.INVALID:
            return self._agent_said_nothing(session, lease, now)
        self.sessions.acknowledge(session, lease.id)

    def _agent_said_nothing(self, session: Session, lease: Lease, now: float) -> None:
        """There is no turn that a reward could be for."""
        self.ledger.end_lease(lease.id, "agent_failed", "the agent ended before it had an answer of the policy", now)
        self.sessions.acknowledge(session, lease.id)

    def _take_back(self, session: Session, back: wire.GiveBack, now: float) -> None:
        lease = self.ledger.leases[back.lease_id]
        sample = lease.sample
        if back.cause == "agent_failed" and not lease.agent:
            return self.refuse(session, lease.id, "bad closing: the lease is no session")
        if not lease.scoring and back.length > sample.length:
            return self.sessions.ask_again(session, lease.id, sample.length)
        error = limits.clip(back.error)
        if error:
            ids = {"worker": session.name, "group": sample.group.id, "sample": sample.index}
            self.books.failures.note(back.cause, error, f"sample {ids['group']}.{ids['sample']} came back", **ids)
        if back.cause == "environment_failed":
            self.recorder.observed(0, 0, failed=1)
        self.ledger.end_lease(lease.id, back.cause, error, now)
        self.sessions.acknowledge(session, lease.id)

    def refuse(self, session: Session, lease_id: int, reason: str, tokens: int = 0) -> None:
        """What was reported of a lease is not taken, so many sampled tokens among it."""
        self.sessions.tallies[session.uid].refused += tokens
        self.sessions.refuse_report(session, lease_id, reason)


def fault_of_score(scored: wire.Scored, responses: int) -> str:
    """What is wrong with the scores of so many responses."""
    if not len(scored.rewards) == len(scored.details) == responses:
        return "a reward, with its details, is for each response of the lease"
    if not all(map(limits.is_reward, scored.rewards)):
        return f"a reward is a finite number up to {limits.REWARD:g}"
    if len(scored.superseded) > wire.BRANCHES:
        return TOO_MANY
    if any(len(one) > limits.DETAILS or not all(map(limits.is_reward, one.values())) for one in scored.details):
        return f"a reward has at most {limits.DETAILS} details, finite numbers up to {limits.REWARD:g}"
    return ""
