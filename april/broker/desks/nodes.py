"""The broker's side of the conversation with the machines of a learner: where their ranks meet."""

from april import wire
from april.broker.sessions import Session, Sessions


class NodeDesk:
    """The first machine says where, the others ask. It holds for as long as that machine's session does."""

    def __init__(self, sessions: Sessions):
        self.sessions = sessions
        self._place = ""
        self._said_by = 0
        """session"""

    def on_Meet(self, session: Session, received: wire.Received, now: float) -> None:
        if received.message.place:
            self._place, self._said_by = received.message.place, session.id
        place = self._place if self._said_by in self.sessions.by_id else ""
        self.sessions.send(session, wire.Meet(place), sequence=received.sequence)
