"""What the broker says to those who hold leases, workers and scorers alike: coming, going, scores, work handed back."""

import logging

from april import wire
from april.broker.books import Books
from april.broker.ledger.ledger import Verdict
from april.broker.ledger.samples import Lease
from april.broker.sessions import Session
from april.wire import limits

log = logging.getLogger(__name__)


class HolderDesk:
    def __init__(self, books: Books):
        self.books = books
        self.config = books.config
        self.ledger = books.ledger
        self.sessions = books.sessions
        self.recorder = books.recorder

    def mark(self, session: Session, instant: str, now: float) -> None:
        """Note an instant of a holder's life: joined, lost."""

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
        return [self.ledger.leases[lease_id] for lease_id in sorted(self.ledger.held.get(uid, ()))]

    def _holds(self, uid: str, lease_id: int) -> bool:
        lease = self.ledger.leases.get(lease_id)
        return lease is not None and lease.worker == uid

    # --- what holders report --------------------------------------------------------------------------------

    def on_Heartbeat(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if len(message.leases) > self.config.security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        tally = self.sessions.tallies[session.uid]
        tally.emitted = max(tally.emitted, message.emitted_tokens)
        mine = {lease_id for lease_id in message.leases if self._holds(session.uid, lease_id)}
        self.ledger.renew(list(mine), now + self.config.broker.lease_s)
        self.sessions.answer_heartbeat(session, [lease_id for lease_id in message.leases if lease_id not in mine])

    def on_Scored(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        check_rewards([message.reward], [message.details])
        if not self._holds(session.uid, message.lease_id):
            return self._refuse(session, received, "the lease is not current")
        verdict = self.ledger.score(message.lease_id, message.reward, message.details)
        if verdict is Verdict.GAP:
            sample = self.ledger.leases[message.lease_id].sample
            return self.sessions.send(session, wire.ResendFrom(message.lease_id, sample.length))
        if verdict is Verdict.INVALID:
            raise wire.WireError("a lease on a group wants the scores of all its responses")
        self.sessions.acknowledge(session, message.lease_id)

    def on_ScoredTogether(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        check_rewards(message.rewards, message.details)
        if not self._holds(session.uid, message.lease_id):
            return self._refuse(session, received, "the lease is not current")
        if self.ledger.score_group(message.lease_id, message.rewards, message.details) is Verdict.INVALID:
            raise wire.WireError("scores of a group are for a lease on it, one for each of its responses")
        self.sessions.acknowledge(session, message.lease_id)

    def on_GiveBack(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self._holds(session.uid, message.lease_id):
            return self._refuse(session, received, "the lease is not current")
        lease = self.ledger.leases[message.lease_id]
        sample = lease.sample
        if not lease.scoring and message.length > sample.length:
            return self.sessions.send(session, wire.ResendFrom(message.lease_id, sample.length))
        error = limits.clip(message.error)
        if error:
            ids = {"worker": session.name, "group": sample.group.id, "sample": sample.index}
            log.warning("sample %d.%d came back: %s: %s", ids["group"], ids["sample"], message.cause, error, extra=ids)
        if message.cause == "environment_failed":
            self.recorder.observed(0, failed=True)
        self.ledger.end_lease(message.lease_id, message.cause, error, now)
        self.sessions.acknowledge(session, message.lease_id)

    def _refuse(self, session: Session, received: wire.Received, reason: str, tokens: int = 0) -> None:
        self.sessions.tallies[session.uid].refused += tokens
        self.sessions.refuse(
            reason, reason, session.data_route, received.message.lease_id, session.id, received.sequence
        )


def check_rewards(rewards: list[float], details: list[dict[str, float]]) -> None:
    if not all(map(limits.is_reward, rewards)):
        raise wire.WireError(f"a reward is a finite number up to {limits.REWARD:g}")
    if any(len(one) > limits.DETAILS or not all(map(limits.is_reward, one.values())) for one in details):
        raise wire.WireError(f"a reward has at most {limits.DETAILS} details, finite numbers up to {limits.REWARD:g}")
