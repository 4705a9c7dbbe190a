"""The broker without its sockets: takes messages, changes ledger and journal, and queues the answers.

The caller syncs the journal before it sends what `handle` and `tick` have queued. Only the messages in
`Peers.immediate` may be sent before, as they depend only on what is on disk.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from april import wire
from april.broker.context import BrokerContext, MessageTable
from april.broker.filters import FilterFailed, GroupFilters
from april.broker.handlers.agents import AgentHandler
from april.broker.handlers.evaluations import Evaluations
from april.broker.handlers.learner import LearnerHandler, NodeHandler
from april.broker.handlers.lease_holders import LeaseHolderHandler, ScorerHandler
from april.broker.handlers.monitors import MonitorHandler
from april.broker.handlers.workers import WorkerHandler
from april.broker.header import check_header, make_header
from april.broker.journal.files import Damaged
from april.broker.journal.journal import Journal
from april.broker.ledger import events
from april.broker.ledger.dead_letters import DEAD_ROUNDS
from april.broker.ledger.ledger import Ledger, LedgerError
from april.broker.ledger.samples import TO_GENERATE, Group, GroupState
from april.broker.payloads import Payloads
from april.broker.peers import HOLDERS, Peer, Peers
from april.broker.plan import ledger_rules, make_schedule
from april.broker.prompts import PromptBook
from april.broker.recovery import SyncNote, check_complete, rebuild
from april.broker.samplers.draws import SamplerFailed
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import ScheduleFailed, ended_rounds
from april.broker.snapshots import Snapshots
from april.broker.telemetry.census import QueueScanner
from april.broker.telemetry.recorder import Recorder, SyncMark
from april.broker.telemetry.sample_history import SampleHistory
from april.broker.verification import JournalVerifier, groups_with_damage
from april.config import Config
from april.util.versions import protocols_differ
from april.wire import limits
from april.wire.security.allow_list import KeyOwner

log = logging.getLogger(__name__)

FILTERED_ROUNDS = 20
"""Number of groups in a row rejected by group filters at which the run fails, as a multiple of a round's groups."""
SWEEP_S = 0.25
"""Seconds between checks for silent peers and expired leases."""
SUMMARY_S = 0.25
"""Least seconds between two writes of `summary.json`, which follow trained steps."""
BUSY_HAND_OUT_S = 0.05
"""Least seconds between two passes that grant leases, while messages wait: acknowledging reports goes first."""

MESSAGES: dict[str, MessageTable] = {
    "worker": WorkerHandler.MESSAGES,
    "scorer": ScorerHandler.MESSAGES,
    "agents": AgentHandler.MESSAGES,
    "learner": LearnerHandler.MESSAGES,
    "node": NodeHandler.MESSAGES,
    "monitor": MonitorHandler.MESSAGES,
}
"""Message types that each role may send, with their handlers. Every role may also send Hello, Bind, Heartbeat and
Goodbye."""
KEY_OF = {"node": "learner"}
"""Role -> role whose key its peers use, for roles without keys of their own."""
OVER = "the run is over"
READ_ONLY_ANSWERS = (wire.Welcome, wire.Status, wire.DeadLetters, wire.Refused)
"""Types of answers that a read-only broker still sends to a monitor; what they say may not be on disk."""


class KeyRefused(wire.WireError):
    """The key of a connection does not permit a message; the text says why."""


class Service:
    """One run's broker.

    service = Service(config, prompts, journal, now)
    service.handle(route, frames, now)      # for each message that has arrived
    service.tick(now)                       # then: rounds, batches, leases
    service.peers.take_outgoing()           # to send, once the journal is synced
    """

    def __init__(self, config: Config, prompts: PromptBook, journal: Journal, now: float):
        self.config = config
        self.prompts = prompts
        self.journal = journal
        self.peers = Peers()
        self.payloads = Payloads(config, journal, prompts)
        self.ledger = Ledger(ledger_rules(config), write=journal.append, group_scored=self.payloads.is_group_scored)
        self.history = SampleHistory(self.ledger)
        self.ledger.clock = now
        self.payloads.bind(self.ledger)
        self.schedule = make_schedule(config.schedule, prompts)
        self.filters = GroupFilters(config.schedule)
        self.snapshots, self.note = Snapshots(journal.folder, self.ledger.rules), SyncNote(journal.folder)
        self._last_warning = ""
        """Last warning about a file that is not essential to the run, kept so that it is not repeated."""
        self._recover()
        self.peers.start_ids(self.ledger.serials.starts)
        self.recorder = Recorder(
            config.run_dir, config.run.name, config.schedule.max_steps, now, self.ledger, self.peers,
            config.operations.sinks, config.engine.paced, config.operations.alarms, self.payloads.metrics_line,
        )  # fmt: skip
        self.queue_scanner = QueueScanner(self.ledger, config.broker.max_run_s)
        self.context = BrokerContext(
            config, prompts, journal, self.snapshots, self.ledger, self.schedule, self.peers, self.payloads,
            self.recorder, self.queue_scanner, self.history, started_at=now, credit_bytes=config.broker.credit_mb << 20,
        )  # fmt: skip
        self.run = self.context.run
        self.evaluations = Evaluations(self.context)
        self.agents = AgentHandler(self.context)
        self.workers = WorkerHandler(self.context, self.evaluations, forward_to_agents=self.agents.forward_rows)
        self.scorers = ScorerHandler(self.context)
        self.learner = LearnerHandler(self.context, self.evaluations)
        self.monitors = MonitorHandler(self.context, stop=self.stop, abort=self.workers.abort)
        self.holder_handlers: dict[str, LeaseHolderHandler] = {
            "worker": self.workers, "scorer": self.scorers, "agents": self.agents,
        }  # fmt: skip
        self.handlers: dict[str, Any] = {
            **self.holder_handlers, "learner": self.learner, "monitor": self.monitors, "node": NodeHandler(self.peers),
        }  # fmt: skip
        self.begin(now)

    # --- start ----------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Rebuild the ledger and the sample history from the snapshot and the journal."""
        position = rebuild(self.ledger, self.journal, self.snapshots.store, self.note.position, self.history)
        check_complete(self.config.run_dir, self.journal, self.ledger)
        self.verifier = JournalVerifier(self.journal.folder, self.ledger, below=position)
        header = make_header(self.config, self.prompts)
        if self.ledger.header is None:
            self.ledger.commit(header)
        else:
            check_header(self.ledger.header, header)
        self.ledger.commit(events.BrokerStarted(self.ledger.serials.starts + 1))

    def begin(self, now: float) -> None:
        """Start the service's timers once peers can reach the broker. Each lease from before the broker's start expires
        after `broker.readopt_s` seconds unless its holder comes back."""
        self._last_tick = self._next_sweep = self._next_hand_out = self._next_summary = now
        for lease in self.ledger.leases.values():
            lease.ends_at = math.inf if lease.agent else now + self.config.broker.max_run_s
            self.ledger.expire_at(lease, now + self.config.broker.readopt_s)

    # --- messages -------------------------------------------------------------------------------------------

    def handle(self, route: bytes, frames: list, now: float, key_owner: KeyOwner | None = None) -> None:
        """Handle one multipart message; a bad one is counted and answered, never raised.

        `key_owner`: owner of the connection's key. None without CURVE; then the role that the peer states applies.
        """
        self.ledger.clock = now
        try:
            if key_owner and not key_owner.role:
                raise KeyRefused("this key is not on the allow-list")
            received = wire.decode(frames, limits.FROM_PEER)
            self._dispatch(route, received, now, key_owner)
        except Damaged as error:
            self._discard_unreadable(groups_with_damage(self.ledger, error), error)
        except (ScheduleFailed, SamplerFailed) as error:
            self._end_by_schedule(error, now)
        except KeyRefused as error:
            self.context.audit.warn("access denied to %s: %s", key_owner and (key_owner.name or key_owner.key), error)
            self.peers.refuse("access denied", f"{wire.DENIED}{error}", route)
        except wire.ProtocolMismatch as error:
            reason = protocols_differ("this peer", error.protocol, "the broker")
            self.context.audit.warn("not let in: %s", reason)
            self.peers.refuse_protocol(error, f"{wire.DENIED}{reason}", route)
        except wire.WireError as error:
            self.context.audit.warn("bad message: %s", error)
            self.peers.refuse(error.cause, f"bad message: {error}", route)

    def _dispatch(self, route: bytes, received: wire.Received, now: float, key_owner: KeyOwner | None) -> None:
        message = received.message
        if isinstance(message, wire.Hello):
            if not self.run.read_only or message.role == "monitor" or (self.run.over and message.role == "learner"):
                self._hello(route, received, now, key_owner)
            return
        peer = self.peers.by_id.get(received.session)
        binds = isinstance(message, wire.Bind) and peer is not None and peer.control_route is None
        if peer is None or not (binds or route in (peer.data_route, peer.control_route)):
            reason = "unknown session; say hello"
            return self.peers.refuse("unknown session", reason, route, received.session, received.sequence)
        if key_owner and (key_owner.key, key_owner.role) != (peer.key, KEY_OF.get(peer.role, peer.role)):
            raise KeyRefused(f"the session belongs to another key, of a {peer.role}")
        peer.last_seen = now
        if isinstance(message, wire.Heartbeat):
            peer.note_heartbeat(message, now)
        if peer.role == "worker":
            self.workers.maybe_ready[peer.id] = peer
        if isinstance(message, wire.Bind):
            peer.control_route = route
        elif self.run.read_only and peer.role != "monitor":
            self._answer_read_only(peer, received, now)
        elif isinstance(message, wire.Goodbye):
            self._goodbye(peer)
        elif handle := MESSAGES[peer.role].get(type(message)):
            handle(self.handlers[peer.role], peer, received, now)
        elif isinstance(message, wire.Heartbeat):
            self.peers.answer_heartbeat(peer, [])
        else:
            raise wire.WireError(f"not for a {peer.role} to send: {type(message).__name__}")

    def _answer_read_only(self, peer: Peer, received: wire.Received, now: float) -> None:
        """Handle a message of a peer while nothing can be written: answer heartbeats, and ignore messages that would
        change the ledger, which the peer will send again. A learner is told that the run is over once it is."""
        if isinstance(received.message, wire.Heartbeat):
            self.peers.answer_heartbeat(peer, [])
        elif isinstance(received.message, wire.Goodbye):
            self.peers.close(peer)
        elif isinstance(received.message, wire.BestRequest):
            self.learner.on_best_request(peer, received, now)
        elif self.run.over and peer.role == "learner":
            self.peers.send(peer, wire.Finished(self.run.over), sequence=received.sequence)

    def enter_read_only(self, reason: str) -> None:
        """Stop changing the ledger, as the journal cannot be written, for `reason`: drop the messages queued for peers.

        Requests for the status are still answered; operators' commands that are not on disk are refused.
        """
        log.critical("READ ONLY: %s", reason)
        monitors = {peer.id for peer in self.peers.by_id.values() if peer.role == "monitor"}
        self.peers.outgoing = [
            answer if isinstance(answer.message, READ_ONLY_ANSWERS) else replace(answer, message=wire.Refused(reason))
            for answer in self.peers.take_outgoing()
            if answer.session in monitors
        ]
        self.run.read_only, self.run.state = reason, self.run.state if self.run.over else "read only"
        if self.run.over:
            self.learner.disown(OVER)

    def _hello(self, route: bytes, received: wire.Received, now: float, key_owner: KeyOwner | None) -> None:
        hello, security = received.message, self.config.security
        if hello.role not in MESSAGES:
            raise wire.WireError("unknown role")
        if len(hello.lease_ids) > security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        if key_owner:
            self._check_identity(hello, key_owner)
        if limit := self.peers.limit_reached(hello, key_owner, security.max_sessions, security.max_key_sessions):
            reason = f"this key or role has all the sessions that {limit!r} leaves it; raise it"
            return self.peers.refuse("too many sessions", reason, route, 0, received.sequence)
        peer, lost = self.peers.open(hello, route, now, key_owner.key if key_owner else ""), []
        if hello.role in HOLDERS:
            lost = self.holder_handlers[hello.role].hello(peer, hello, now)
        elif hello.role == "learner":
            self.learner.hello(peer)
        else:
            self.peers.close_earlier(peer)
        welcome = wire.Welcome(
            session=peer.id,
            run=self.config.run.name,
            broker_start=self.ledger.serials.starts,
            round=self.ledger.rounds.number,
            watermark=self.ledger.rounds.watermark,
            lost_lease_ids=lost,
            renew_s=self.config.broker.renew_s,
            weights_address=self.ledger.learner.weights_address,
            weights_key=self.ledger.learner.weights_key,
            weight_folders=self.ledger.learner.weight_folders,
        )
        self.peers.send(peer, welcome, sequence=received.sequence)
        if hello.role in HOLDERS:
            self.holder_handlers[hello.role].after_welcome(peer)
            if self.run.over:
                self.peers.send_control(peer, wire.Stop(self.run.over))

    def _check_identity(self, hello: wire.Hello, key_owner: KeyOwner) -> None:
        """Check that the key belongs to this role, and that no peer with another key has this process uid or name.
        Raises KeyRefused."""
        if KEY_OF.get(hello.role, hello.role) != key_owner.role:
            raise KeyRefused(f"the key of {key_owner.name} is a {key_owner.role}'s, not a {hello.role}'s")
        for other in self.peers.by_id.values():
            namesake = other.role in HOLDERS and (other.role, other.name) == (hello.role, hello.name)
            is_same = other.uid == hello.uid or namesake
            if is_same and other.key != key_owner.key:
                raise KeyRefused(f"another key works under the name {hello.name}; choose another with --name")

    def end_session(self, peer: Peer, why: str, now: float) -> None:
        """End the session of a peer that left without a goodbye. `why`: reason for the log."""
        ids = {"role": peer.role} | ({"worker": peer.name} if peer.role in HOLDERS else {})
        log.warning("the session of %s %s ends: %s", peer.role, peer.name, why, extra=ids)
        if peer.role in HOLDERS:
            return self.holder_handlers[peer.role].lose(peer, why, now)
        if peer.role == "learner":
            self.learner.pending_fetch = None
        self.peers.close(peer)

    def _goodbye(self, peer: Peer) -> None:
        if peer.role in HOLDERS:
            self.holder_handlers[peer.role].goodbye(peer)
        else:
            self.peers.close(peer)

    def synced(self, mark: SyncMark) -> None:
        """Record that a sync of the journal has ended; the metrics as of `mark`, its beginning, are on disk now."""
        self.note.write(self.journal.synced)
        self.recorder.synced(mark)

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self, now: float, caught_up: bool = True) -> None:
        """Advance rounds, deliver batches and grant leases, as the messages handled since the last tick and the time
        require.

        `caught_up`: no message waits to be handled, so a peer that seems silent is silent.
        """
        self.ledger.clock = now
        if self.run.read_only:
            for peer, _ in list(self._silent(now)) if caught_up else ():
                self.peers.close(peer)
            return
        try:
            self._tick(now, caught_up)
        except Damaged as error:
            self._discard_unreadable(groups_with_damage(self.ledger, error), error)
        except (ScheduleFailed, SamplerFailed, LedgerError) as error:
            if self.config.schedule.kind in SCHEDULES.shipped and not isinstance(error, SamplerFailed):
                raise
            self._end_by_schedule(error, now)

    def _end_by_schedule(self, error: Exception, now: float) -> None:
        """End the run: the user's schedule or sampler has failed, or has chosen a sample that cannot be leased."""
        log.error("the schedule has failed", exc_info=error)
        self.stop(str(error), "failed", now)

    def _discard_unreadable(self, groups: list[Group], error: Damaged | None) -> None:
        """Discard groups that the journal cannot read back. Raises `error` if the damaged bytes are the journal's and
        belong to no group."""
        if error and error.is_of_journal and not groups:
            raise error
        for group in groups:
            if group.state is GroupState.TRAINED:
                continue  # nobody needs it, unless a learner goes back
            log.error("group %d cannot be read back from the journal and is discarded", group.id)
            step = group.step
            self.ledger.discard(group, "unreadable")
            if step in self.ledger.deliveries:
                self.learner.restart_fetch(step)

    def _tick(self, now: float, caught_up: bool) -> None:
        unreadable = [group for number in self.verifier.take() if (group := self.ledger.groups.get(number))]
        self._discard_unreadable(unreadable, None)
        if self.ledger.leases.generating:
            self.recorder.add_generating_time(now - self._last_tick)
        self._last_tick = now
        if self.run.summary_is_old and now >= self._next_summary:
            self._write_summary(now)
        if caught_up and now >= self._next_sweep:
            self._sweep(now)
        if not self.run.over:
            self._advance(now)
        self.learner.answer_fetch()
        if not self.run.over and (caught_up or now >= self._next_hand_out):
            self._next_hand_out = now + BUSY_HAND_OUT_S
            self.agents.hand_out(now)
            self.workers.hand_out(now)
            self.scorers.hand_out(now)
        self.evaluations.announce()
        self._cancel_revoked()
        self.monitors.log_deaths()
        self.recorder.update_peak(self.ledger)
        self.queue_scanner.advance(now)
        self.snapshots.follow(self.journal.file_start, self.payloads.release_files, now)
        self.payloads.reclaim_images(self.history.live_images, now)

    @property
    def has_more(self) -> bool:
        """Whether the next pass of the loop has something to send even if no message arrives."""
        return self.learner.can_send or (self.workers.has_more and not (self.run.over or self.run.read_only))

    def _sweep(self, now: float) -> None:
        """End the sessions of silent peers and the leases that were not renewed, and check the main loops of peers for
        hangs."""
        self._next_sweep = now + SWEEP_S
        for peer, timeout_s in list(self._silent(now)):
            if peer.role in HOLDERS:
                self.holder_handlers[peer.role].lose(peer, f"silent for {timeout_s:g} s", now)
            elif peer.role == "learner":
                self.end_session(peer, f"silent for {timeout_s:g} s", now)
            else:
                self.peers.close(peer)
        slots = sum(max(0, peer.capacity - self.config.worker.prefetch) for peer in self.peers.workers())
        waiting = sum(map(self.ledger.open_samples.count, TO_GENERATE))
        self.recorder.add_slot_usage(self.ledger.leases.generating, slots, waiting)
        if not self.run.over:
            self.evaluations.watch(now)
            if stands_still := self.workers.standstill(now):
                self.stop(stands_still, "failed", now)
        for lease in self.ledger.expire(now):
            self._cancel(lease.worker, lease.id)
        self.recorder.alarms.watch([peer.loop(now) for peer in self.peers.by_id.values() if peer.loop_position])

    def _silent(self, now: float) -> Iterator[tuple[Peer, float]]:
        """(peer, allowed silence in seconds) of each peer that has been silent for longer than it may be."""
        for peer in self.peers.by_id.values():
            is_learner = peer.role == "learner"
            timeout_s = self.config.learner.hung_s if is_learner else self.config.broker.session_timeout_s
            if now - peer.last_seen > timeout_s:
                yield peer, timeout_s

    def _cancel_revoked(self) -> None:
        """Tell the holders of revoked leases to drop their samples, whose groups have been discarded."""
        revoked, self.ledger.leases.revoked = self.ledger.leases.revoked, []
        for holder, lease_id in revoked:
            self._cancel(holder, lease_id)

    def _cancel(self, holder: str, lease_id: int) -> None:
        if peer := self.peers.holder(holder):
            self.holder_handlers[peer.role].cancel(peer, lease_id)

    def _advance(self, now: float) -> None:
        step = self.ledger.steps.consumed
        if (lost := self.ledger.lost_batch) is not None:
            why = f"nothing of batch {lost} can be read back from the journal"
            return self.stop(f"{why}; begin a new run from the weights of the last checkpoint", "failed", now)
        self.evaluations.open_due()
        try:
            self.ledger.filter_ready(self.filters.reason_against)
        except FilterFailed as error:
            return self.stop(str(error), "failed", now)
        if self.filters.in_a_row >= FILTERED_ROUNDS * self.config.schedule.groups_per_round:
            count, reason = self.filters.in_a_row, self.filters.last_reason
            return self.stop(f"{count} groups in a row were filtered out, the last for {reason}", "failed", now)
        for _ in ended_rounds(self.schedule, self.ledger):
            self.workers.abort(now)
        self.evaluations.record_complete()
        if self.ledger.dead_letters.groups_in_a_row >= DEAD_ROUNDS * self.config.schedule.groups_per_round:
            count, last = self.ledger.dead_letters.groups_in_a_row, self.ledger.dead_letters.last_error
            return self.stop(f"{count} groups in a row lost samples for good, the last to: {last}", "failed", now)
        all_trained = self.schedule.finished(self.ledger) and step == self.ledger.steps.next
        if all_trained and not self.ledger.evaluations:
            why = "all steps are done" if step >= self.config.schedule.max_steps else "the prompts are exhausted"
            self.stop(why, "finished", now)

    def end_file(self) -> None:
        """Begin a new file of the journal if the current one is full; a snapshot of the closed files follows."""
        if not self.journal.file_full:
            return
        try:
            position = self.journal.rotate()
        except OSError as error:
            return self._warn_once(f"the journal's file grows on, as no other can be opened ({error})")
        self._last_warning = ""
        if self.snapshots.processes_failed:
            self.snapshots.make_in_broker(position, self.ledger, self.history, self.payloads.release_files)

    # --- the end --------------------------------------------------------------------------------------------

    def stop(self, reason: str, state: str, now: float) -> None:
        """End the run for `reason`, with the final state `state`: lease holders are told to stop at once, the learner
        in answer to its next fetch."""
        if not self.run.over:
            log.info("the run is over: %s", reason)
            self.run.over, self.run.state = reason, state
            self.peers.broadcast(wire.Stop(reason))
            if self.run.read_only:
                self.learner.disown(OVER)
            self._write_summary(now)

    def everyone_left(self) -> bool:
        """Whether the run is over and all lease holders and the learner have disconnected.

        While the exported policy is missing after the last step, the broker waits for a learner to connect first.
        """
        if not self.run.over or self.peers.holders() or self.peers.learner():
            return False
        return not (
            self.run.state == "finished" and not (self.learner.has_connected or self.config.exported_policy.is_dir())
        )

    def close(self, now: float) -> None:
        self._write_summary(now)
        self.recorder.metrics_file.write()
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
            self._warn_once(f"the summary cannot be written ({error}); it is tried again")

    def _warn_once(self, warning: str) -> None:
        if warning != self._last_warning:
            log.warning("%s", warning)
        self._last_warning = warning
