"""The sessions of an agents process: opened by the broker, run by programs, closed with a reward.

A session whose program fails is given back and starts from nothing, possibly in another process. A program that is lost
with its process is run again at once, and its calls are answered from the journal up to the point it had reached.
"""

import asyncio
import logging

from april import wire
from april.agents.conversation_tree import ConversationTree
from april.agents.forwarding import OVER_STATUS
from april.agents.gateway import Gateway, task_of
from april.agents.host import StartProgram
from april.agents.link import BrokerLink, RowWithPayload
from april.agents.listening import Addresses
from april.agents.programs import Runner
from april.agents.rendering import Renderer
from april.config import AgentSection
from april.wire.limits import clip

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Number of times that the process of a session's program may die without a new turn in between. After one more death
the session is given back to the broker."""
MAX_CLOSED = 10_000
"""Number of closed sessions whose lease ids an agents process remembers."""


class Agents:
    """All agent sessions that this agents process holds. Implements `Listener` (for the broker link) and
    `ProgramObserver` (for the runner)."""

    def __init__(self, section: AgentSection, gateway: Gateway, renderer: Renderer):
        self.section = section
        self.gateway = gateway
        self.renderer = renderer
        self.sessions: dict[int, ConversationTree] = {}
        self.addresses: Addresses
        self.runner: Runner
        self.link: BrokerLink
        self.stopped = asyncio.Event()
        self.failure = ""
        """Why this process cannot continue; "" while it can."""
        self.completed = 0
        """Number of sessions closed without an error."""
        self._closed: dict[int, None] = {}
        """Lease ids of the last `MAX_CLOSED` sessions closed here (a dict used as an ordered set)."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._deaths: dict[int, tuple[int, int]] = {}
        """Lease id of a session -> (number of its turns when its program's process last died, number of deaths since
        the last of these turns was opened)."""

    # --- from the broker --------------------------------------------------------------------------------------

    def open_session(self, lease: wire.AgentSession, rows: list[RowWithPayload]) -> None:
        if session := self.sessions.get(lease.lease_id):
            return session.receive_rows(rows)
        if lease.lease_id in self._closed:
            return  # sent again after a reconnect, before the broker has read that the session is closed
        by_tokens = self.section.history == "template"
        session = ConversationTree(
            lease, self.renderer, self.link.send_observation, self.section.max_turn_tokens, by_tokens
        )
        session.receive_rows(rows)
        self.sessions[lease.lease_id] = session
        self._run(session)

    def receive_rows(self, rows: list[RowWithPayload]) -> None:
        for row, payload in rows:
            if session := self.sessions.get(wire.session_lease_id(row.lease_id)):
                session.receive_rows([(row, payload)])

    def drop(self, lease_id: int, why: str) -> None:
        """Forget a session and cancel its program. `why`: reason with which HTTP calls of the session that still wait
        are refused. For later requests with the session's key, the broker is asked which process holds the session."""
        if self._forget(lease_id, why, status=None):
            self.runner.cancel(lease_id)

    def receive_holder(self, holder: wire.Holder) -> None:
        if self.gateway.forwarder:
            self.gateway.forwarder.receive_holder(holder)

    def stop(self, why: str) -> None:
        if self.gateway.forwarder:
            self.gateway.forwarder.ask_broker = None
        for lease_id in list(self.sessions):
            self.drop(lease_id, why)
        self.stopped.set()

    # --- from programs ----------------------------------------------------------------------------------------

    def program_started(self, key: int) -> None:
        """Start the timeout (`agent.timeout_s`) of the session with lease id `key`; running the program again does not
        restart it."""
        if key not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(self.section.timeout_s, self._time_out, key)

    def program_ended(
        self, key: int, reward: float | None, error: str, state: bytes = b"", details: dict[str, float] | None = None
    ) -> None:
        session = self.sessions.get(key)
        if session is None:
            return
        if error:
            return self._give_back(key, error)
        if reward is None:
            reward, details = session.reward, session.details
        superseded, state = session.superseded_forks(), state or session.state
        closing: wire.Closing = wire.Closed(key, superseded, state)
        if reward is not None:
            closing = wire.Scored(key, [reward], [details or {}], superseded, state)
        self.completed += 1
        self._close(closing, "its agent has ended")

    def process_died(self, keys: list[int], why: str) -> None:
        for key in keys:
            if session := self.sessions.get(key):
                if self.section.replay == "discard" and session.turns:
                    self._close(wire.GiveBack(key, 0, "leave"), why)
                    continue
                turns, deaths = self._deaths.get(key, (0, 0))
                deaths = deaths + 1 if turns == len(session.turns) else 1
                self._deaths[key] = len(session.turns), deaths
                if deaths > MAX_DEATHS:
                    self._give_back(key, why)
                else:
                    self._run(session)

    def runner_failed(self, why: str) -> None:
        """Leave the run, since this process cannot run programs any more, for the reason `why`. Other agents processes
        continue its open sessions."""
        self.failure = f"the process of agent.program = {self.section.program!r}: {why}"
        self.link.leave(self.failure)

    # --- sessions ---------------------------------------------------------------------------------------------

    def _run(self, session: ConversationTree) -> None:
        key = self.gateway.admit(session)
        local, public = self.addresses.local, self.addresses.public
        order = StartProgram(session.lease.lease_id, local, key, task_of(session), session.replaying, public)
        self.runner.start_program(order)

    def _time_out(self, lease_id: int) -> None:
        self.runner.cancel(lease_id)
        self._give_back(lease_id, f"it took longer than agent.timeout_s = {self.section.timeout_s:g}")

    def _give_back(self, lease_id: int, error: str) -> None:
        """Give the session of a failed program back to the broker; its sample will start again from nothing. `error`:
        text of the failure."""
        if session := self.sessions.get(lease_id):
            ids = {"group": session.lease.group, "sample": session.lease.index}
            log.warning("an agent has failed: %s", error, extra=ids)
            reason = clip(error.splitlines()[0])
            self._close(wire.GiveBack(lease_id, 0, "agent_failed", reason), "its agent has failed")

    def _close(self, closing: wire.Closing, why: str) -> None:
        """Forget a session and send the broker `closing`, the message that says how it has ended. `why`: reason with
        which HTTP calls of the session that still wait are refused."""
        self._forget(closing.lease_id, why)
        self._closed[closing.lease_id] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self.link.close_session(closing)

    def _forget(self, lease_id: int, why: str, status: int | None = OVER_STATUS) -> ConversationTree | None:
        session = self.sessions.pop(lease_id, None)
        if session:
            session.end(why)
            self.gateway.dismiss(session, status)
            if timer := self._timers.pop(lease_id, None):
                timer.cancel()
            self._deaths.pop(lease_id, None)
        return session
