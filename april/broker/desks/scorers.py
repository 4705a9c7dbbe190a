"""Handles messages of scorers: leases on complete responses that wait for their score.

A scorer needs no weights, so any scorer takes any sample.
"""

from april import wire
from april.broker.desks.holders import LeaseHolderHandler
from april.broker.sessions import Peer


class ScorerHandler(LeaseHolderHandler):
    def on_HolderCapacity(self, peer: Peer, received: wire.Received, now: float) -> None:
        peer.capacity = min(received.message.capacity, self.config.security.max_leases)

    def hand_out(self, now: float) -> None:
        """Grant leases to scorers with room, the least loaded first; none while the broker is drained."""
        queue = self.ledger.queue
        if self.ledger.draining or not self.ledger.rules.scored_apart or not queue.has_scoring:
            return
        ready = [peer for peer in self.peers.scorers() if self._has_room(peer)]
        while ready and (sample := queue.take_scoring()):
            peer = min(ready, key=lambda each: self._load(each) / each.capacity)
            self.lease(sample, peer, 0, now)
            ready = [peer for peer in ready if self._has_room(peer)]

    def _load(self, peer: Peer) -> int:
        """Number of leases the scorer holds."""
        return len(self.ledger.held.get(peer.uid, ()))

    def _has_room(self, peer: Peer) -> bool:
        if not peer.control_route or self._load(peer) >= peer.capacity:
            return False
        return self.peers.has_credit(peer, self.context.credit_bytes)
