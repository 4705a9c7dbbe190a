"""Handles messages of a learner's machines: the rendezvous address of their ranks."""

from april import wire
from april.broker.sessions import Peer, Peers


class NodeHandler:
    """The first machine announces the address, the others ask for it; it is valid while that machine is connected."""

    def __init__(self, peers: Peers):
        self.peers = peers
        self._address = ""
        self._announced_by = 0
        """Session id of the machine that announced the address."""

    def on_Rendezvous(self, peer: Peer, received: wire.Received, now: float) -> None:
        if received.message.address:
            self._address, self._announced_by = received.message.address, peer.id
        address = self._address if self._announced_by in self.peers.by_id else ""
        self.peers.send(peer, wire.Rendezvous(address), sequence=received.sequence)
