"""An agents process at work: sessions come from the broker, programs run for them, closings go back.

A program that fails by itself starts from nothing, elsewhere perhaps. One that is lost with its process is run again
at once, and is answered from the journal up to where it was.
"""

import asyncio
import logging

from april import wire
from april.agents.elsewhere import OVER
from april.agents.gateway import Gateway, task_of
from april.agents.host import Begin
from april.agents.link import Link, Said
from april.agents.listening import Addresses
from april.agents.programs import Runner
from april.agents.rendering import Renderer
from april.agents.session import AgentSession
from april.config import AgentSection
from april.wire.limits import clip

log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""of the process of a session's program without a turn in between, before the session is given back"""


class Agents:
    """A `Listener` and an `Audience`."""

    def __init__(self, section: AgentSection, gateway: Gateway, renderer: Renderer):
        self.section = section
        self.gateway = gateway
        self.renderer = renderer
        self.sessions: dict[int, AgentSession] = {}
        self.addresses: Addresses
        self.runner: Runner
        self.link: Link
        self.over = asyncio.Event()
        self.failure = ""
        """why this process cannot go on"""
        self.completed = 0
        """sessions that were closed"""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._deaths: dict[int, tuple[int, int]] = {}
        """(turns, deaths at that number of turns)"""

    # --- from the broker --------------------------------------------------------------------------------------

    def open(self, told: wire.Session, said: list[Said]) -> None:
        if session := self.sessions.get(told.lease_id):
            return session.hear(said)
        rendered = self.section.history == "template"
        session = AgentSession(told, self.renderer, self.link.say, self.section.max_turn_tokens, rendered)
        session.hear(said)
        self.sessions[told.lease_id] = session
        self._run(session)

    def hear(self, said: list[Said]) -> None:
        for row, payload in said:
            if session := self.sessions.get(wire.session_of(row.lease_id)):
                session.hear([(row, payload)])

    def lose(self, lease_id: int, why: str) -> None:
        """The broker knows what becomes of it: who shows its key is told that."""
        if self._forget(lease_id, why, status=None):
            self.runner.cease(lease_id)

    def found(self, holder: wire.Holder) -> None:
        if self.gateway.elsewhere:
            self.gateway.elsewhere.hear(holder)

    def stop(self, why: str) -> None:
        if self.gateway.elsewhere:
            self.gateway.elsewhere.ask = None
        for lease_id in list(self.sessions):
            self.lose(lease_id, why)
        self.over.set()

    # --- from programs ----------------------------------------------------------------------------------------

    def began(self, key: int) -> None:
        """Its time runs, and does not begin anew where it is run again."""
        if key not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(self.section.timeout_s, self._overdue, key)

    def ended(self, key: int, reward: float | None, error: str, state: bytes = b"") -> None:
        session = self.sessions.get(key)
        if session is None:
            return
        if error:
            return self._give_back(key, error)
        reward = session.reward if reward is None else reward
        behind, state = session.superseded(), state or session.state
        closing: wire.Closing = wire.Closed(key, behind, state)
        if reward is not None:
            closing = wire.Scored(key, [reward], [{}], behind, state)
        self.completed += 1
        self._forget(key, "its agent has ended")
        self.link.close_session(closing)

    def died(self, keys: list[int], why: str) -> None:
        for key in keys:
            if session := self.sessions.get(key):
                if self.section.replay == "discard" and session.turns:
                    self._forget(key, why)
                    self.link.close_session(wire.GiveBack(key, 0, "leave"))
                    continue
                turns, deaths = self._deaths.get(key, (0, 0))
                deaths = deaths + 1 if turns == len(session.turns) else 1
                self._deaths[key] = len(session.turns), deaths
                if deaths > MOST_DEATHS:
                    self._give_back(key, why)
                else:
                    self._run(session)

    def broken(self, why: str) -> None:
        """Others go on with what is open here."""
        self.failure = f"the process of agent.program = {self.section.program!r}: {why}"
        self.link.leave(self.failure)

    # --- sessions ---------------------------------------------------------------------------------------------

    def _run(self, session: AgentSession) -> None:
        key = self.gateway.admit(session)
        near, public = self.addresses.near, self.addresses.public
        order = Begin(session.told.lease_id, near, key, task_of(session), session.replaying, public)
        self.runner.begin(order)

    def _overdue(self, lease_id: int) -> None:
        self.runner.cease(lease_id)
        self._give_back(lease_id, f"it took longer than agent.timeout_s = {self.section.timeout_s:g}")

    def _give_back(self, lease_id: int, error: str) -> None:
        """The session starts from nothing."""
        if session := self._forget(lease_id, "its agent has failed"):
            ids = {"group": session.told.group, "sample": session.told.index}
            log.warning("an agent has failed: %s", error, extra=ids)
            self.link.close_session(wire.GiveBack(lease_id, 0, "agent_failed", clip(error.splitlines()[0])))

    def _forget(self, lease_id: int, why: str, status: int | None = OVER) -> AgentSession | None:
        session = self.sessions.pop(lease_id, None)
        if session:
            session.end(why)
            self.gateway.dismiss(session, status)
            if timer := self._timers.pop(lease_id, None):
                timer.cancel()
            self._deaths.pop(lease_id, None)
        return session
