"""The broker's side of the conversation with scorers: leases on responses that are complete and wait for their score.

A scorer needs no weights, so that any of them takes anything.
"""

from april import wire
from april.broker.desks.holders import HolderDesk
from april.broker.sessions import Session


class ScorerDesk(HolderDesk):
    def on_Room(self, session: Session, received: wire.Received, now: float) -> None:
        session.capacity = min(received.message.capacity, self.config.security.max_leases)

    def hand_out(self, now: float) -> None:
        """Fill every scorer as far as it has room, the emptiest first; nothing while the broker is drained."""
        queue = self.ledger.queue
        if self.ledger.draining or not self.ledger.rules.scored_apart or not queue.has_scoring:
            return
        able = [session for session in self.sessions.scorers() if self._has_room(session)]
        while able and (sample := queue.take_scoring()):
            session = min(able, key=lambda one: self._load(one) / one.capacity)
            self.lease(sample, session, 0, now)
            able = [session for session in able if self._has_room(session)]

    def _load(self, session: Session) -> int:
        """Leases that it holds."""
        return len(self.ledger.held.get(session.uid, ()))

    def _has_room(self, session: Session) -> bool:
        if not session.control_route or self._load(session) >= session.capacity:
            return False
        return self.sessions.has_credit(session, self.books.credit_bytes)
