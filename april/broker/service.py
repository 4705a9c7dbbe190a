"""The broker without its sockets: decoded messages in, ledger and journal changed, messages out.

`handle` and `tick` only queue what is to be sent; the caller syncs the journal before it sends any of it,
except what `Sessions.at_once` holds: that rests on nothing that is not on disk.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from april import wire
from april.broker.books import Books
from april.broker.desks.agents import AgentDesk
from april.broker.desks.evaluations import Evaluations
from april.broker.desks.holders import HolderDesk
from april.broker.desks.learner import LearnerDesk
from april.broker.desks.monitors import MonitorDesk
from april.broker.desks.nodes import NodeDesk
from april.broker.desks.scorers import ScorerDesk
from april.broker.desks.workers import WorkerDesk
from april.broker.header import check_header, make_header
from april.broker.journal.files import Damaged, Reference
from april.broker.journal.journal import Journal
from april.broker.ledger import events
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import TO_GENERATE, Group, GroupState
from april.broker.ledger.state import DEAD_ROUNDS
from april.broker.payloads import Payloads
from april.broker.plan import ledger_rules, make_schedule
from april.broker.prompts import PromptBook
from april.broker.recovery import SyncNote, check_whole, rebuild
from april.broker.sessions import HOLDERS, Session, Sessions
from april.broker.snapshots import Snapshots
from april.broker.telemetry.census import Census
from april.broker.telemetry.lives import Lives
from april.broker.telemetry.recorder import Mark, Recorder
from april.broker.verification import Verifier, groups_at
from april.config import Config
from april.filters.filters import FilterFailed, GroupFilters
from april.formats.versions import protocols_differ
from april.security.allow_list import Peer
from april.wire import limits

log = logging.getLogger(__name__)

FILTERED_ROUNDS = 20
"""rounds of which every group is filtered out before the run is given up"""
SWEEP_S = 0.25
"""how often silent sessions and old leases are looked for"""
CLOCK_S = 0.05
"""how exactly the journal tells the time"""
SUMMARY_S = 0.25
"""`summary.json` is written after a step, but not more often"""
BEHIND_S = 0.05
"""while messages wait to be handled, work is handed out only so often: what is done is acknowledged first"""

MAY_SEND = {
    "worker": {"Heartbeat", "Holding", "Lane", "Report"},
    "scorer": {"Heartbeat", "Room", "Report"},
    "agents": {"Heartbeat", "Room", "Report", "Whose"},
    "learner": {"Heartbeat", "LearnerStart", "Submit", "Fetch", "Consumed", "Durable", "BestWanted"},
    "node": {"Heartbeat", "Meet"},
    "monitor": {"Heartbeat", "StatusRequest", "StopRun", "Drain", "DeadLettersRequest", "Requeue"},
}

KEY_OF = {"node": "learner"}
"""roles whose peers show the key of another one"""
QUESTIONS_ANSWERED = (wire.Welcome, wire.Status, wire.DeadLetters, wire.Refused)
"""what a monitor may be told though nothing that it rests on is on disk"""


class AccessDenied(wire.WireError):
    """The key of the connection is not one for this message; the text says why."""


class Service:
    """One run's broker.

    service = Service(config, prompts, journal, now)
    service.handle(route, frames, now)      # for each message that has arrived
    service.tick(now)                       # then: rounds, batches, leases
    service.sessions.take_outgoing()        # to send, once the journal is synced
    """

    def __init__(self, config: Config, prompts: PromptBook, journal: Journal, now: float):
        self.config = config
        self.prompts = prompts
        self.journal = journal
        self.sessions = Sessions()
        self.payloads = Payloads(journal, prompts, config.reward.name, config.sampling.is_cut)
        self.ledger = Ledger(ledger_rules(config), write=self._write, together=self.payloads.scored_together)
        self.lives = Lives(self.ledger)
        self._now = now
        self.prompts.bind(self.ledger, journal.read)
        self.schedule = make_schedule(config.schedule, prompts)
        self.filters = GroupFilters(config.schedule)
        self.snapshots, self.note = Snapshots(journal.folder, self.ledger.rules), SyncNote(journal.folder)
        self._said = ""
        """the last complaint about a file that others do not depend on"""
        self._recover()
        self.sessions.number_from(self.ledger.starts)
        self.recorder = Recorder(
            config.run_dir, config.run.name, config.schedule.max_steps, now, self.ledger, self.sessions,
            config.operations.sinks, config.engine.paced, config.operations.alarms,
        )  # fmt: skip
        self.census = Census(self.ledger, config.broker.max_run_s)
        self.books = Books(
            config, prompts, journal, self.snapshots, self.ledger, self.schedule, self.sessions, self.payloads,
            self.recorder, self.census, self.lives, started_at=now, credit_bytes=config.broker.credit_mb << 20,
        )  # fmt: skip
        self.run = self.books.run
        self.evaluations = Evaluations(self.books)
        self.agents = AgentDesk(self.books)
        self.workers = WorkerDesk(self.books, tell_agents=self.agents.tell)
        self.scorers = ScorerDesk(self.books)
        self.learner = LearnerDesk(self.books, self.evaluations)
        self.monitors = MonitorDesk(self.books, stop=self.stop, abort=self.workers.abort)
        self.holders: dict[str, HolderDesk] = {
            "worker": self.workers, "scorer": self.scorers, "agents": self.agents,
        }  # fmt: skip
        nodes = NodeDesk(self.sessions)
        self.desks = {**self.holders, "learner": self.learner, "node": nodes, "monitor": self.monitors}
        self.begin(now)

    # --- start ----------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Rebuild the ledger from snapshot and journal."""
        position = rebuild(self.ledger, self.journal, self.snapshots.store, self.note.position, self.lives)
        check_whole(self.config.run_dir, self.journal, self.ledger)
        self.verifier = Verifier(self.journal.folder, self.ledger, below=position)
        header = make_header(self.config, self.prompts)
        if self.ledger.header is None:
            self.ledger.commit(header)
        else:
            check_header(self.ledger.header, header)
        self.ledger.commit(events.BrokerStarted(self.ledger.starts + 1))

    def _write(self, event: events.Event, arrays: Sequence[events.Part]) -> Reference:
        if self._now - self.ledger.now >= CLOCK_S and not isinstance(event, events.TimePassed | events.RunStarted):
            self.ledger.commit(events.TimePassed(self._now))
        self.lives.see(event)
        return self.journal.append(event, arrays)

    def begin(self, now: float) -> None:
        """Peers can reach the broker from now on: former holders of leases have `readopt_s` to come back."""
        self._last_tick = self._next_sweep = self._next_hand_out = self._next_summary = now
        for lease in self.ledger.leases.values():
            lease.ends_at = math.inf if lease.agent else now + self.config.broker.max_run_s
            self.ledger.expire_at(lease, now + self.config.broker.readopt_s)

    # --- messages -------------------------------------------------------------------------------------------

    def handle(self, route: bytes, frames: list, now: float, peer: Peer | None = None) -> None:
        """Take one multipart message; what is wrong with it is counted and answered, never raised.

        `peer` is whom the connection's key belongs to, None without CURVE: then the role that a session states counts.
        """
        self._now = now
        try:
            if peer and not peer.role:
                raise AccessDenied("this key is not on the allow-list")
            received = wire.decode(frames, limits.FROM_PEER)
            answer = self._answer_read_only if self.run.read_only else self._dispatch
            answer(route, received, now, peer)
        except Damaged as error:
            self._lose(groups_at(self.ledger, error), error, now)
        except AccessDenied as error:
            self.books.audit.say("access denied to %s: %s", peer and (peer.name or peer.key), error)
            self.sessions.refuse("access denied", f"{wire.DENIED}{error}", route)
        except wire.OtherProtocol as error:
            reason = protocols_differ("this peer", error.protocol, "the broker")
            self.books.audit.say("not let in: %s", reason)
            self.sessions.refuse_protocol(error, f"{wire.DENIED}{reason}", route)
        except wire.WireError as error:
            self.books.audit.say("bad message: %s", error)
            self.sessions.refuse(error.cause, f"bad message: {error}", route)

    def _dispatch(self, route: bytes, received: wire.Received, now: float, peer: Peer | None) -> None:
        message = received.message
        if isinstance(message, wire.Hello):
            return self._hello(route, received, now, peer)
        session = self.sessions.by_id.get(received.session)
        binds = isinstance(message, wire.Bind) and session is not None and session.control_route is None
        if session is None or not (binds or route in (session.data_route, session.control_route)):
            reason = "unknown session; say hello"
            return self.sessions.refuse("unknown session", reason, route, received.session, received.sequence)
        if peer and (peer.key, peer.role) != (session.key, KEY_OF.get(session.role, session.role)):
            raise AccessDenied(f"the session belongs to another key, of a {session.role}")
        session.last_seen = now
        if isinstance(message, wire.Heartbeat):
            session.hear(message, now)
        kind = type(message).__name__
        if session.role == "worker":
            self.workers.hungry[session.id] = session
        if isinstance(message, wire.Bind):
            session.control_route = route
        elif isinstance(message, wire.Goodbye):
            self._goodbye(session)
        elif kind not in MAY_SEND[session.role]:
            raise wire.WireError(f"not for a {session.role} to send: {kind}")
        elif kind == "Heartbeat" and session.role not in HOLDERS:
            self.sessions.answer_heartbeat(session, [])
        else:
            getattr(self.desks[session.role], f"on_{kind}")(session, received, now)

    def _answer_read_only(self, route: bytes, received: wire.Received, now: float, peer: Peer | None) -> None:
        """Peers learn that the broker lives, monitors what they ask; whatever would change something has to wait."""
        message, session = received.message, self.sessions.by_id.get(received.session)
        if isinstance(message, wire.Hello) and message.role == "monitor":
            self._hello(route, received, now, peer)
        elif session and session.role == "monitor":
            self._dispatch(route, received, now, peer)
        elif session and isinstance(message, wire.Heartbeat):
            self.sessions.answer_heartbeat(session, [])
        elif session and isinstance(message, wire.Goodbye):
            self.sessions.close(session)

    def fall_silent(self, reason: str) -> None:
        """Nothing can be written any more: forget what peers were to be told, and change nothing from here on.
        Monitors still get answers to what they asked; what they had ordered is refused."""
        log.critical("READ ONLY: %s", reason)
        monitors = {session.id for session in self.sessions.by_id.values() if session.role == "monitor"}
        self.sessions.outgoing = [
            answer if isinstance(answer.message, QUESTIONS_ANSWERED) else replace(answer, message=wire.Refused(reason))
            for answer in self.sessions.take_outgoing()
            if answer.session in monitors
        ]
        self.run.read_only, self.run.state = reason, self.run.state if self.run.over else "read only"

    def _hello(self, route: bytes, received: wire.Received, now: float, peer: Peer | None) -> None:
        hello = received.message
        if hello.role not in MAY_SEND:
            raise wire.WireError("unknown role")
        if len(hello.leases) > self.config.security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        if peer:
            self._check_identity(hello, peer)
        if self._is_full(hello):
            count = self.config.security.max_sessions
            reason = f"the broker has {count} peers, all that 'security.max_sessions' allows; raise it"
            return self.sessions.refuse("too many sessions", reason, route, 0, received.sequence)
        session, lost = self.sessions.open(hello, route, now, peer.key if peer else ""), []
        if hello.role in HOLDERS:
            lost = self.holders[hello.role].hello(session, hello, now)
        elif hello.role == "learner":
            self.learner.hello(session)
        else:
            self._close_namesakes(session)
        welcome = wire.Welcome(
            session=session.id,
            run=self.config.run.name,
            start=self.ledger.starts,
            round=self.ledger.round,
            watermark=self.ledger.watermark,
            lost=lost,
            renew_s=self.config.broker.renew_s,
            weights_address=self.ledger.weights_address,
            weights_key=self.ledger.weights_key,
        )
        self.sessions.send(session, welcome, sequence=received.sequence)
        if hello.role in HOLDERS:
            self.holders[hello.role].welcomed(session)
        if self.run.over and hello.role in HOLDERS:
            self.sessions.send_control(session, wire.Stop(self.run.over))

    def _check_identity(self, hello: wire.Hello, peer: Peer) -> None:
        """A key has one role, and nobody takes the place of another key's session."""
        if KEY_OF.get(hello.role, hello.role) != peer.role:
            raise AccessDenied(f"the key of {peer.name} is a {peer.role}'s, not a {hello.role}'s")
        for other in self.sessions.by_id.values():
            namesake = other.role in HOLDERS and (other.role, other.name) == (hello.role, hello.name)
            same = other.uid == hello.uid or namesake
            if same and other.key != peer.key:
                raise AccessDenied(f"another key works under the name {hello.name}; choose another with --name")

    def _is_full(self, hello: wire.Hello) -> bool:
        sessions = self.sessions.by_id.values()
        return len(sessions) >= self.config.security.max_sessions and all(s.uid != hello.uid for s in sessions)

    def _close_namesakes(self, session: Session) -> None:
        """A monitor that says hello again has no use for its old session."""
        for other in list(self.sessions.by_id.values()):
            if other is not session and other.role == session.role and other.uid == session.uid:
                self.sessions.close(other)

    def end_session(self, session: Session, why: str, now: float) -> None:
        """Without the peer's doing."""
        ids = {"role": session.role} | ({"worker": session.name} if session.role in HOLDERS else {})
        log.warning("the session of %s %s ends: %s", session.role, session.name, why, extra=ids)
        if session.role in HOLDERS:
            return self.holders[session.role].lose(session, why, now)
        if session.role == "learner":
            self.learner.waiting = None
        self.sessions.close(session)

    def _goodbye(self, session: Session) -> None:
        if session.role in HOLDERS:
            self.holders[session.role].goodbye(session)
        else:
            self.sessions.close(session)

    def synced(self, mark: Mark) -> None:
        """What the recorder had marked is on disk now."""
        self.note.write(self.journal.synced)
        self.recorder.synced(mark)

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self, now: float, caught_up: bool = True) -> None:
        """What follows from the messages handled since the last tick, and from time passing.

        `caught_up`: no message waits to be handled, so that who seems silent is silent.
        """
        self._now = now
        if self.run.read_only:
            return
        try:
            self._tick(now, caught_up)
        except Damaged as error:
            self._lose(groups_at(self.ledger, error), error, now)

    def _lose(self, groups: list[Group], why: Damaged | None, now: float) -> None:
        """Groups that the journal cannot give back are discarded and counted, and the rest goes on; a batch that has
        nothing left ends the run. Raises `why` where no group is to blame."""
        if why and not groups:
            raise why
        for group in groups:
            if group.state is GroupState.TRAINED:
                continue  # nobody needs it, unless a learner goes back
            log.error("group %d cannot be read back from the journal and is discarded", group.id)
            step = group.step
            self.ledger.discard(group, "unreadable")
            if step in self.ledger.deliveries:
                self.learner.begin_again(step)
                if not self.ledger.deliveries[step]:
                    self.stop(f"nothing of batch {step} can be read back from the journal", "failed", now)

    def _tick(self, now: float, caught_up: bool) -> None:
        bad = [group for number in self.verifier.take() if (group := self.ledger.groups.get(number))]
        self._lose(bad, None, now)
        if self.ledger.generating:
            self.recorder.generating(now - self._last_tick)
        self._last_tick = now
        if self.run.summary_is_old and now >= self._next_summary:
            self._write_summary(now)
        if caught_up and now >= self._next_sweep:
            self._sweep(now)
        if not self.run.over:
            self._advance(now)
        self.learner.answer_fetch()
        if not self.run.over and (caught_up or now >= self._next_hand_out):
            self._next_hand_out = now + BEHIND_S
            self.agents.hand_out(now)
            self.workers.hand_out(now)
            self.scorers.hand_out(now)
        self._cancel_voided()
        self.monitors.log_deaths()
        self.recorder.buffered(self.ledger)
        self.census.advance(now)
        self.snapshots.follow(self.journal.file_begins, self.journal.let_go, now)

    @property
    def has_more(self) -> bool:
        """Whether the next pass has something to send that follows from no message."""
        return self.learner.can_send or (self.workers.has_more and not (self.run.over or self.run.read_only))

    def _sweep(self, now: float) -> None:
        """End the sessions of peers that have not been heard of, and the leases that were not renewed."""
        self._next_sweep = now + SWEEP_S
        for session in list(self.sessions.by_id.values()):
            is_learner = session.role == "learner"
            timeout_s = self.config.learner.hung_s if is_learner else self.config.broker.session_timeout_s
            if now - session.last_seen <= timeout_s:
                continue
            if session.role in HOLDERS:
                self.holders[session.role].lose(session, f"silent for {timeout_s:g} s", now)
            elif is_learner:
                self.end_session(session, f"silent for {timeout_s:g} s", now)
            else:
                self.sessions.close(session)
        slots = sum(max(0, one.capacity - self.config.worker.prefetch) for one in self.sessions.workers())
        waiting = sum(map(self.ledger.open_samples.count, TO_GENERATE))
        self.recorder.occupied(self.ledger.generating, slots, waiting)
        for lease in self.ledger.expire(now):
            self._cancel(lease.worker, lease.id)
        self.recorder.alarms.watch([session.stay(now) for session in self.sessions.by_id.values() if session.place])

    def _cancel_voided(self) -> None:
        """Tell the holders which of their samples have gone with their group."""
        voided, self.ledger.voided = self.ledger.voided, []
        for holder, lease_id in voided:
            self._cancel(holder, lease_id)

    def _cancel(self, holder: str, lease_id: int) -> None:
        if session := self.sessions.of_uid(holder):
            self.holders[session.role].cancel(session, lease_id)

    def _advance(self, now: float) -> None:
        step = self.ledger.consumed
        self.evaluations.open_due()
        try:
            self.ledger.filter_ready(self.filters.reason_against)
        except FilterFailed as error:
            return self.stop(str(error), "failed", now)
        if self.filters.in_a_row >= FILTERED_ROUNDS * self.config.schedule.groups_per_round:
            count, reason = self.filters.in_a_row, self.filters.last_reason
            return self.stop(f"{count} groups in a row were filtered out, the last for {reason}", "failed", now)
        while self.schedule.advance(self.ledger):
            self.workers.abort(now)
        self.evaluations.record_complete()
        if self.ledger.dead_in_a_row >= DEAD_ROUNDS * self.config.schedule.groups_per_round:
            count, last = self.ledger.dead_in_a_row, self.ledger.last_error
            return self.stop(f"{count} groups in a row lost samples for good, the last to: {last}", "failed", now)
        all_trained = self.schedule.finished(self.ledger) and step == self.ledger.next_step
        if all_trained and not self.ledger.evaluations:
            why = "all steps are done" if step >= self.config.schedule.max_steps else "the prompts are exhausted"
            self.stop(why, "finished", now)

    def end_file(self) -> None:
        """When a file of the journal is full, begin a new one; a snapshot of those that are closed follows."""
        if not self.journal.file_full:
            return
        try:
            position = self.journal.rotate()
        except OSError as error:
            return self._say_once(f"the journal's file grows on, as no other can be opened ({error})")
        self._said = ""
        if self.snapshots.helpless:
            self.snapshots.make_here(position, self.ledger, self.lives, self.journal.let_go)

    # --- the end --------------------------------------------------------------------------------------------

    def stop(self, reason: str, state: str, now: float) -> None:
        """No batch any more: workers leave, the learner is told at its next fetch."""
        if not self.run.over:
            log.info("the run is over: %s", reason)
            self.run.over, self.run.state = reason, state
            self.sessions.broadcast(wire.Stop(reason))
            self._write_summary(now)

    def everyone_left(self) -> bool:
        """The run is over and no worker, scorer or learner is connected any more. Where all steps are done, the learner
        has to come once if the policy that it exports is missing."""
        if not self.run.over or self.sessions.holders() or self.sessions.of_role("learner"):
            return False
        return not (self.run.state == "finished" and not (self.learner.came or self.config.exported_policy.is_dir()))

    def close(self, now: float) -> None:
        self._write_summary(now)
        self.recorder.lines.write()
        self.note.close()
        self.verifier.close()
        self.recorder.sinks.close()
        self.snapshots.close()

    def _write_summary(self, now: float) -> None:
        self.run.summary_is_old, self._next_summary = False, now + SUMMARY_S
        if self.run.read_only:
            return
        try:
            self.recorder.write_summary(self.ledger, self.run.state, now, self.prompts.counts())
            self.monitors.write_dead_letters()
        except OSError as error:
            self.run.summary_is_old = True
            self._say_once(f"the summary cannot be written ({error}); it is tried again")

    def _say_once(self, what: str) -> None:
        if what != self._said:
            log.warning("%s", what)
        self._said = what
