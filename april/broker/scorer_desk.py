"""The broker's side of the conversation with scorers: leases on responses that are complete and wait for their score.

A scorer needs no weights, so that any of them takes anything; what it reports goes to the desk of the workers.
"""

from typing import TYPE_CHECKING

from april import wire
from april.broker.sessions import Session

if TYPE_CHECKING:
    from april.broker.service import Service


class ScorerDesk:
    def __init__(self, service: "Service"):
        self.service = service
        self.config = service.config
        self.ledger = service.ledger
        self.sessions = service.sessions

    def on_Room(self, session: Session, received: wire.Received, now: float) -> None:
        session.capacity = min(received.message.capacity, self.config.security.max_leases)

    def hand_out(self, now: float) -> None:
        """Fill every scorer as far as it has room, the emptiest first; nothing while the broker is drained."""
        queue = self.ledger.queue
        if self.ledger.draining or not self.ledger.rules.scored_apart or not queue.has_scoring:
            return
        able = [session for session in self.sessions.scorers() if self._has_room(session)]
        while able and (sample := queue.take_scoring()):
            session = min(able, key=lambda one: self.leases(one) / one.capacity)
            lease_s, max_run_s = self.config.broker.lease_s, self.config.broker.max_run_s
            lease = self.ledger.lease(sample, session.uid, 0, now + lease_s, now + max_run_s)
            self.service.workers.send_grant(session, lease)
            able = [session for session in able if self._has_room(session)]

    def leases(self, session: Session) -> int:
        """How many it holds."""
        return len(self.ledger.held.get(session.uid, ()))

    def _has_room(self, session: Session) -> bool:
        if not session.control_route or self.leases(session) >= session.capacity:
            return False
        return self.sessions.has_credit(session, self.service.credit_bytes)
