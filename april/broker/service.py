"""The broker without its sockets: decoded messages in, ledger and journal changed, messages out.

`handle` and `tick` only queue what is to be sent; the caller syncs the journal before it sends any of it.
"""

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from april import wire
from april.broker import events
from april.broker.census import Census
from april.broker.journal import Journal, JournalError, Reference
from april.broker.learner_desk import LearnerDesk
from april.broker.ledger import Ledger
from april.broker.monitor_desk import MonitorDesk
from april.broker.plan import ledger_rules, make_schedule
from april.broker.prompts import PromptBook
from april.broker.recorder import Recorder
from april.broker.samples import Group, GroupState, Sample
from april.broker.sessions import Outgoing, Session, Sessions
from april.broker.snapshot import SnapshotStore, freeze, live_positions, thaw
from april.broker.worker_desk import WorkerDesk
from april.config import Config
from april.data.prompts import Row

log = logging.getLogger(__name__)

PROMPTS_CACHED = 64
DEAD_ROUNDS = 2
"""rounds in which every group dies before the run is given up"""
SWEEP_S = 0.25
"""how often silent sessions and old leases are looked for"""

MAY_SEND = {
    "worker": {"Heartbeat", "Holding", "Lane", "Chunk", "Scored", "GiveBack"},
    "learner": {"Heartbeat", "LearnerStart", "Fetch", "Consumed", "Durable"},
    "monitor": {"Heartbeat", "StatusRequest", "StopRun", "Drain", "DeadLettersRequest", "Requeue"},
}


class Service:
    def __init__(self, config: Config, prompts: PromptBook, journal: Journal, now: float):
        self.config = config
        self.prompts = prompts
        self.journal = journal
        self.sessions = Sessions()
        self.started_at = now
        self.over = ""
        """why there will be no batch any more; empty while the run goes on"""
        self.state = "running"
        self.read_only = ""
        """why nothing can be written; what is in memory is then ahead of the disk, and nobody is told of it"""
        self.bad_messages: Counter[str] = Counter()
        self.credit_bytes = config.broker.credit_mb << 20
        self.ledger = Ledger(ledger_rules(config), record=journal.append)
        self.schedule = make_schedule(config.schedule, prompts)
        self.snapshots = SnapshotStore(journal.folder)
        self.read_prompt = lru_cache(maxsize=PROMPTS_CACHED)(self._read_prompt)
        """prompt ids by their place in the journal; the samples of a group are mostly handed out one after the other"""
        self._recover(now)
        self.sessions.number_from(self.ledger.epoch)
        max_steps = config.schedule.max_steps
        self.recorder = Recorder(config.run_dir, config.run.name, max_steps, now, self.ledger, self.sessions)
        self.workers = WorkerDesk(self)
        self.learner = LearnerDesk(self)
        self.monitors = MonitorDesk(self)
        self.census = Census(self.ledger, config.broker.max_run_s)
        for step in self.ledger.evaluations:
            self._record_evaluation(step)
        self._last_tick = now
        self._next_sweep = now

    # --- start ----------------------------------------------------------------------------------------------

    def _recover(self, now: float) -> None:
        """Rebuild the ledger from snapshot and journal; former holders of leases have `readopt_s` to come back."""
        position, image = next(self.snapshots.newest_first(), (0, None))
        if image:
            thaw(image, self.ledger)
        for event, reference in self.journal.replay(position):
            self.ledger.apply(event, reference)
        header = events.RunStarted(
            self.config.run.name,
            self.prompts.fingerprint,
            self.config.seed,
            self.ledger.rules.batch_groups,
            self.ledger.rules.group_size,
            self.ledger.rules.max_staleness,
            self.ledger.rules.max_attempts,
            self.ledger.rules.min_group_size,
            self.ledger.rules.max_response_tokens,
        )
        if self.ledger.header is None:
            self.ledger.commit(header)
        elif self.ledger.header != header:
            raise JournalError(
                f"journal {self.journal.folder} belongs to another run ({self.ledger.header}), not {header}; "
                "go on with that run's configuration and dataset, or choose another run.name"
            )
        for lease in self.ledger.leases.values():
            lease.ends_at = now + self.config.broker.max_run_s
            self.ledger.expire_at(lease, now + self.config.broker.readopt_s)
            lease.ends_at = now + self.config.broker.max_run_s
        self.ledger.commit(events.BrokerStarted(self.ledger.epoch + 1))

    # --- messages -------------------------------------------------------------------------------------------

    def handle(self, route: bytes, frames: list, now: float) -> None:
        """Take one multipart message; what is wrong with it is counted and answered, never raised."""
        try:
            received = wire.decode(frames)
            if self.read_only:
                self._answer_read_only(route, received, now)
            else:
                self._dispatch(route, received, now)
        except wire.WireError as error:
            self.bad_messages[str(error).split(":")[0]] += 1
            log.warning("bad message: %s", error)
            self.sessions.outgoing.append(Outgoing(route, wire.Refused(f"bad message: {error}")))

    def _dispatch(self, route: bytes, received: wire.Received, now: float) -> None:
        message = received.message
        if isinstance(message, wire.Hello):
            return self._hello(route, received, now)
        session = self.sessions.by_id.get(received.session)
        binds = isinstance(message, wire.Bind) and session is not None and session.control_route is None
        if session is None or not (binds or route in (session.data_route, session.control_route)):
            refusal = wire.Refused("unknown session; say hello", getattr(message, "token", 0))
            self.sessions.outgoing.append(Outgoing(route, refusal, [], received.session, received.sequence))
            return
        session.last_seen = now
        if isinstance(message, wire.Heartbeat):
            session.received_bytes = max(session.received_bytes, message.received_bytes)
        kind = type(message).__name__
        if isinstance(message, wire.Bind):
            session.control_route = route
        elif isinstance(message, wire.Goodbye):
            self._goodbye(session, now)
        elif kind not in MAY_SEND[session.role]:
            raise wire.WireError(f"not for a {session.role} to send: {kind}")
        elif session.role == "worker":
            getattr(self.workers, f"on_{kind}")(session, received, now)
        elif kind == "Heartbeat":
            self.sessions.send_control(session, wire.Renewed([]))
        else:
            desk = self.learner if session.role == "learner" else self.monitors
            getattr(desk, f"on_{kind}")(session, received, now)

    def _answer_read_only(self, route: bytes, received: wire.Received, now: float) -> None:
        """Peers learn that the broker lives, monitors what they ask; whatever would change something has to wait."""
        message, session = received.message, self.sessions.by_id.get(received.session)
        if isinstance(message, wire.Hello) and message.role == "monitor":
            self._hello(route, received, now)
        elif session and isinstance(message, wire.Heartbeat):
            self.sessions.send_control(session, wire.Renewed([]))
        elif session and session.role == "monitor":
            self._dispatch(route, received, now)

    def fall_silent(self, reason: str) -> None:
        """Nothing can be written any more: forget what peers were to be told, and change nothing from here on."""
        log.critical("READ ONLY: %s", reason)
        monitors = {session.id for session in self.sessions.by_id.values() if session.role == "monitor"}
        self.sessions.outgoing = [m for m in self.sessions.take_outgoing() if m.session in monitors]
        self.read_only, self.state = reason, "read only"

    def _hello(self, route: bytes, received: wire.Received, now: float) -> None:
        hello = received.message
        if hello.role not in MAY_SEND:
            raise wire.WireError(f"unknown role: {hello.role}")
        session, lost = self.sessions.open(hello, route, now), []
        if hello.role == "worker":
            lost = self.workers.hello(session, hello, now)
        elif hello.role == "learner":
            self.learner.hello(session)
        welcome = wire.Welcome(
            session=session.id,
            run=self.config.run.name,
            epoch=self.ledger.epoch,
            round=self.ledger.round,
            watermark=self.ledger.watermark,
            lost=lost,
            renew_s=self.config.broker.renew_s,
            weights_address=self.ledger.weights_address,
        )
        self.sessions.send(session, welcome, sequence=received.sequence)
        if self.over and hello.role == "worker":
            self.sessions.send_control(session, wire.Stop(self.over))

    def _goodbye(self, session: Session, now: float) -> None:
        if session.role == "worker":
            self.workers.goodbye(session, now)
        else:
            self.sessions.close(session)

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self, now: float, caught_up: bool = True) -> None:
        """What follows from the messages handled since the last tick, and from time passing.

        `caught_up`: no message waits to be handled, so that who seems silent is silent.
        """
        if self.read_only:
            return
        if self.ledger.generating:
            self.recorder.generating(now - self._last_tick)
        self._last_tick = now
        if caught_up and now >= self._next_sweep:
            self._sweep(now)
        if not self.over:
            self._advance(now)
        self.learner.answer_fetch()
        if not self.over:
            self.workers.hand_out(now)
        self.workers.cancel_voided()
        self.recorder.buffered(self.ledger)
        self.census.advance(now)

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + SWEEP_S
        self.workers.drop_silent(now)
        self.monitors.log_deaths()
        for session in list(self.sessions.by_id.values()):
            if session.role == "monitor" and now - session.last_seen > self.config.broker.session_timeout_s:
                self.sessions.close(session)

    def _advance(self, now: float) -> None:
        step = self.ledger.consumed
        if self._evaluation_due(step):
            self._open_evaluation(step)
        while self.schedule.advance(self.ledger):
            self.workers.abort(now)
        for opened in self.ledger.evaluations:
            if opened not in self.recorder.evaluations:
                self._record_evaluation(opened)
        if self.ledger.dead_in_a_row >= DEAD_ROUNDS * self.config.schedule.groups_per_round:
            count, error = self.ledger.dead_in_a_row, self.ledger.last_error
            return self.stop(f"{count} groups in a row lost samples for good, the last to: {error}", "failed", now)
        all_trained = self.schedule.finished(self.ledger) and step == self.ledger.next_step
        if all_trained and all(opened in self.recorder.evaluations for opened in self.ledger.evaluations):
            why = "all steps are done" if step >= self.config.schedule.max_steps else "the prompts are exhausted"
            self.stop(why, "finished", now)

    def _evaluation_due(self, step: int) -> bool:
        if not self.prompts.evaluation_tokens or step in self.ledger.evaluations or step < self.ledger.frontier:
            return False
        every = self.config.evaluation.every
        at_the_end = self.schedule.finished(self.ledger) and step == self.ledger.next_step
        return step == 0 or at_the_end or bool(every and step % every == 0)

    def _open_evaluation(self, step: int) -> None:
        for position, tokens in self.prompts.evaluation_tokens:
            self.ledger.open_group(step, position, floor=step, evaluation=True, size=1, prompt=tokens)

    def _record_evaluation(self, step: int) -> None:
        groups = self.ledger.evaluations[step]
        if all(group.state is not GroupState.OPEN for group in groups):
            result = self.recorder.evaluated(step, groups)
            accuracy, prompts = result["accuracy"], result["prompts"]
            log.info("evaluation at step %d: accuracy %s on %d prompts", step, accuracy, prompts, extra={"step": step})

    def step_trained(self, step: int, metrics: dict[str, float], now: float) -> None:
        record = self.recorder.consumed(step, self.ledger, metrics, now)
        self._write_summary(now)
        reward, tokens = record["reward"], record["tokens"]
        log.info("step %d trained: reward %.3f, %d tokens", step, reward, tokens, extra={"step": step})

    def take_snapshot(self) -> None:
        """When a segment of the journal is full, begin a new one with a picture of the ledger, and reclaim space."""
        if not self.journal.segment_full or self.snapshots.busy:
            return
        position = self.journal.rotate()
        image = freeze(self.ledger)
        dead_segments = self.journal.reclaim(self.snapshots.newest, live_positions(image))
        self.snapshots.write(position, image, dead_segments)

    # --- the end --------------------------------------------------------------------------------------------

    def stop(self, reason: str, state: str, now: float) -> None:
        """No batch any more: workers leave, the learner is told at its next fetch."""
        if not self.over:
            log.info("the run is over: %s", reason)
            self.over, self.state = reason, state
            self.sessions.broadcast(wire.Stop(reason))
            self._write_summary(now)
            self.sessions.broadcast(wire.Stop(reason))
            if not self.read_only:
                self.recorder.write_summary(self.ledger, state, now)

    def everyone_left(self) -> bool:
        """The run is over and no worker or learner is connected any more."""
        return bool(self.over) and not self.sessions.workers() and self.sessions.of_role("learner") is None

    def close(self, now: float) -> None:
        self._write_summary(now)
        self.snapshots.close()

    def _write_summary(self, now: float) -> None:
        if not self.read_only:
            self.recorder.write_summary(self.ledger, self.state, now)
            self.monitors.write_dead_letters()

    # --- payloads -------------------------------------------------------------------------------------------

    def _read_prompt(self, reference: Reference) -> wire.Packed:
        _, [(checksum, data)] = self.journal.read(reference)
        return wire.Packed("i4", checksum, data)

    def read_chunks(self, sample: Sample) -> Iterator[tuple[wire.Packed, wire.Packed]]:
        """(ids, behaviour logprobs) of the acknowledged chunks of a sample."""
        for reference in sample.chunks:
            _, [(checksum, ids), (logprobs_checksum, logprobs)] = self.journal.read(reference)
            yield wire.Packed("i4", checksum, ids), wire.Packed("f4", logprobs_checksum, logprobs)

    def read_response(self, sample: Sample) -> list[wire.Packed]:
        """[ids, behaviour logprobs] of all its acknowledged tokens."""
        chunks = list(self.read_chunks(sample))
        if len(chunks) == 1:
            return list(chunks[0])
        return [join(column) for column in zip(*chunks, strict=True)]

    def row_of(self, group: Group) -> Row:
        if group.evaluation:
            return self.prompts.evaluation_rows[group.row]
        return self.prompts.row(group.epoch, group.row)

    def recent_steps(self, count: int) -> list[dict[str, Any]]:
        return [self.recorder.steps[step] for step in sorted(self.recorder.steps)[-count:]]


def join(pieces: Iterable[wire.Packed]) -> wire.Packed:
    pieces = list(pieces)
    data = b"".join(piece.data for piece in pieces)
    return wire.Packed(pieces[0].dtype, zlib.crc32(data), data)
