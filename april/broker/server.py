"""The broker's process: one thread, one poll loop, one ROUTER. Drain, apply, sync, and only then answer."""

import contextlib
import errno
import logging
import math
import os
import signal
import time
from collections import deque
from functools import partial
from pathlib import Path

import zmq

from april import wire
from april.broker import memory
from april.broker.inbox import Inbox
from april.broker.journal.files import JournalError
from april.broker.journal.journal import Journal
from april.broker.journal.place import place_journal
from april.broker.prompts import PromptBook
from april.broker.service import Service
from april.broker.sessions import Outgoing
from april.broker.submitted import open_prompts
from april.broker.views.exporter import Exporter, Picture
from april.broker.views.health import condition
from april.broker.views.metrics import Photographer, SyncTimes
from april.config import Config, is_loopback
from april.connections import sockets
from april.connections.address import ADDRESS_FILE
from april.files.replace import replace_file
from april.formats.versions import RUN_FOLDER
from april.processes import clock
from april.processes.descriptors import NO_DESCRIPTORS, raise_limit
from april.processes.lifetime import STEP_ASIDE
from april.security.allow_list import AllowList
from april.security.door import Door
from april.security.keys import ALLOW_LIST, load_keys
from april.wire import limits

log = logging.getLogger(__name__)

POLL_MS = 50
DRAIN_S = 0.004
"""longest handling of messages in one pass: what arrives meanwhile waits, and the answers do"""
UNSYNCED_BYTES = 32 << 20
"""most that is handled while a sync is under way; then it is waited for"""
SMALL_SYNC_BYTES = 256 << 10
"""so much is sooner on disk than another thread at work"""
OUTBOX_MESSAGES = 1024
"""most messages kept for a peer that does not read; more end its session"""
HTTP_FILE = "http"
"""in the run folder: the base of the URLs of metrics and health"""
ZERO_COPY_RECV = 10
"""libzmq's context option, which pyzmq has no name for; left on, every small message that waits keeps the 8 KB it
came in"""
RETRY_S = 5.0
"""how often a broker that ran out of disk looks for room"""
PROBE_BYTES = 16 << 20
HEALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *NO_DESCRIPTORS)
"""refusals after which the disk can be written again"""
BIND_S, BIND_AGAIN_S = 10.0, 0.2
"""longest wait for the port of a broker that was killed, and how often it is tried"""
LEAVE_S = 600.0
"""longest wait at the end of a run for workers and learner to say goodbye, or as long as a learner may take to save"""
LEAVE_AFTER_SIGNAL_S = 60.0
"""the same after a signal"""


class BindError(RuntimeError):
    """The broker's address cannot be used; the text says why."""


class Server:
    """Serves one run from start to end.

    server = Server(config)
    server.serve()          # returns when the run is over, or after a signal
    """

    def __init__(self, config: Config):
        """Raises ConfigError, JournalError or BindError."""
        raise_limit()
        keys = load_keys(config.security.keys, "broker")
        allow_list = AllowList(config.security.keys / ALLOW_LIST) if config.security.keys else None
        config.run_dir.mkdir(parents=True, exist_ok=True)
        new = not (config.run_dir / "config.toml").exists()
        RUN_FOLDER.claim(config.run_dir, new)
        if new:
            replace_file(config.run_dir / "config.toml", config.to_toml().encode())
        self.config = config
        self.door: Door | None = None
        """None where there are no keys"""
        self._synced = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """can be read when a sync has ended"""
        self._open(open_prompts(config))
        self.context = zmq.Context()
        self.context.set(ZERO_COPY_RECV, 0)
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_S * 1000))
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.FROM_PEER.frame_bytes)
        self.socket.setsockopt(zmq.RCVHWM, limits.UPLOAD_QUEUE_MESSAGES)
        if keys and allow_list:
            self.door = Door(self.context, keys, allow_list)
            self.door.guard(self.socket)
            self.service.books.failed_handshakes = self.door.failures
        self.inbox = Inbox(self.socket)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._synced, zmq.POLLIN)
        self.address_file: Path = config.run_dir / ADDRESS_FILE
        try:
            self._bind(config.broker.bind)
            self.exporter = start_exporter(config)
        except BaseException:
            self._let_go()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._photographer, self._sync_times = Photographer(), SyncTimes()
        self._leave_s = max(LEAVE_S, config.learner.load_s)
        self._signal = ""
        self._trimmer = memory.Trimmer()
        self._retry_at = 0.0
        self._ended: tuple[str, str] | None = None
        """reason and state of a run that was over when its disk failed"""
        self._unsent: list[Outgoing] = []
        """answers that wait for the sync under way"""
        self._in_sync = self.service.recorder.mark()
        """what the sync under way puts on disk"""
        self._late: dict[bytes, deque[Outgoing]] = {}

    def _open(self, prompts: PromptBook) -> None:
        """Rebuild the service from what is on disk."""
        broker = self.config.broker
        folder = place_journal(self.config.run_dir, broker.journal_dir)
        self.journal = Journal(folder, broker.journal_file_mb << 20, broker.journal_file_records)
        self.journal.on_sync_ended = partial(os.eventfd_write, self._synced, 1)
        self.service = Service(self.config, prompts, self.journal, clock.now())
        if self.door:
            self.service.books.failed_handshakes = self.door.failures
        self.journal.sync()

    def _bind(self, endpoint: str) -> None:
        """Bind; where any port will do, that of a broker of this run that was killed, as its peers come back to it."""
        mend = "give a free one of this machine"
        deadline = clock.now()
        if endpoint.endswith(":*") and self.address_file.exists():
            endpoint = endpoint[:-1] + self.address_file.read_text().rpartition(":")[2]
            mend = f"the run's peers look for it there: free it, or remove {self.address_file} if none is left"
            deadline += BIND_S
        while True:
            try:
                self.socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if clock.now() >= deadline:
                    raise BindError(f"key 'broker.bind' = {endpoint!r} cannot be used ({error}); {mend}") from None
            time.sleep(BIND_AGAIN_S)

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(STEP_ASIDE, self._on_signal)
        self.say_where()
        log.info("broker of run %s at %s", self.service.config.run.name, self.address)
        over_since = None
        memory.settle()
        self.service.begin(clock.now())
        self.service.verifier.start()
        try:
            while over_since is None or clock.now() - over_since < self._leave_s:
                self.serve_once()
                if self.steps_aside:
                    why = self.service.run.read_only or ("drained" if self.service.ledger.draining else "synced")
                    return log.info("told to leave by %s, %s: peers wait for the next broker", self._signal, why)
                if self.service.everyone_left():
                    break
                if self.service.run.over and over_since is None:
                    over_since = clock.now()
            self.address_file.unlink(missing_ok=True)
        finally:
            self.close()

    def say_where(self) -> None:
        """In the run folder, once it serves: whoever finds it there may tell the broker to leave, too."""
        replace_file(self.address_file, self.address.encode())
        if self.exporter:
            replace_file(self.config.run_dir / HTTP_FILE, self.exporter.address.encode())

    @property
    def steps_aside(self) -> bool:
        """Told to do so, or to leave while drained or while nothing can be written down any more: another broker of
        this run, here or elsewhere, goes on from its journal."""
        run = self.service.run
        aside = self._signal == STEP_ASIDE.name or self.service.ledger.draining
        return bool(self._signal and (run.read_only or (aside and not run.over)))

    def serve_once(self) -> None:
        """Handle what has arrived, and send the answers that a sync has covered.

        While some records are being synced, what comes meanwhile is handled already; its answers wait for the next
        sync.
        """
        if not self.inbox.has_message:
            self._wait(0 if self.service.has_more else POLL_MS)
        try:
            self._work()
        except (JournalError, OSError) as error:
            self._fail(error)
        if self.service.run.read_only and clock.now() >= self._retry_at:
            self._recover()
        if self.exporter:
            self.exporter.passed(clock.now(), self._picture)
        self._trimmer.passed()

    def _wait(self, timeout_ms: int) -> None:
        """For a message, or the end of a sync."""
        while ready := dict(self._poller.poll(timeout_ms)):
            if self._synced in ready:
                os.eventfd_read(self._synced)
            if self.socket in ready or self.journal.syncing:
                return

    def _work(self) -> None:
        caught_up = self._drain()
        if self.door and self.door.watch() and not self.service.run.read_only:
            self._end_revoked()
        if self._signal and not self.steps_aside:
            self.service.stop(f"signal {self._signal}", "stopped", clock.now())
        self.service.tick(clock.now(), caught_up)
        self._send(self.service.sessions.take_at_once())
        if self.service.run.read_only:
            return self._send(self.service.sessions.take_outgoing())
        if self.journal.sync_runs and self.journal.unsynced_bytes < UNSYNCED_BYTES:
            return
        self._finish_sync()
        self._unsent = self.service.sessions.take_outgoing()
        self._in_sync = self.service.recorder.mark()
        in_a_thread = self.journal.unsynced_bytes > SMALL_SYNC_BYTES or self.inbox.has_message
        self.journal.begin_sync(aside=in_a_thread and not self.journal.file_full)
        if not self.journal.sync_runs:
            self._finish_sync()
            self.service.end_file()

    def _finish_sync(self) -> None:
        """Wait for the sync that is under way, and send what it has covered."""
        if self.journal.syncing:
            self.journal.finish_sync()
            self._sync_times.observe(self.journal.sync_s)
            self.service.synced(self._in_sync)
        unsent, self._unsent = self._unsent, []
        self._send(unsent)

    def _picture(self) -> Picture:
        outbox_messages = sum(len(waiting) for waiting in self._late.values())
        now = clock.now()
        series = self._photographer.read(self.service.books, outbox_messages, now)
        return Picture(condition(self.service.books, now), series, self._sync_times.picture())

    def _fail(self, error: JournalError | OSError) -> None:
        """Stay up without a disk: nothing is acknowledged, questions are answered, and room is waited for."""
        if not isinstance(error, JournalError):
            error = self.journal.fail(error)
        self.service.sessions.outgoing[:0], self._unsent = self._unsent, []
        self.service.fall_silent(str(error))
        self._retry_at = clock.now() + RETRY_S if error.errno in HEALS else math.inf

    def _recover(self) -> None:
        """Once there is room again, go on from what is on disk, as after a crash; peers say hello again."""
        self._retry_at = clock.now() + RETRY_S
        if self.service.run.over:
            self._ended = self.service.run.over, self.service.run.state
        try:
            probe_disk(self.journal.folder)
            self.journal.close()
            self.service.note.close()
            self.service.verifier.close()
            self.service.snapshots.close()
            self.service.recorder.lines.write()
            self._open(self.service.prompts)
        except (JournalError, OSError) as error:
            log.error("there is still no going on: %s", error)
        else:
            self.service.begin(clock.now())
            if self._ended:
                self.service.stop(*self._ended, clock.now())
            log.warning("the journal can be written again; going on as start %d", self.service.ledger.starts)

    def _drain(self) -> bool:
        """Handle what has arrived, heartbeats answered at once; True if nothing is left."""
        until = clock.now() + DRAIN_S
        while (now := clock.now()) < until and (arrived := self.inbox.next(self.service.sessions.by_id)):
            route, *frames = arrived
            peer = self.door.peer_of(route) if self.door else None
            self.service.handle(route.bytes, frames, now, peer)
        self._send(self.service.sessions.take_at_once())
        return now < until

    def _end_revoked(self) -> None:
        """End the sessions of keys that are not on the allow-list any more, or have another role there."""
        for session in list(self.service.sessions.by_id.values()):
            if self.door and self.door.allow_list.find(session.key).role != session.role:
                self.service.end_session(session, "its key is off the allow-list", clock.now())

    def _send(self, outgoing: list[Outgoing]) -> None:
        """Send, after what a peer has not read yet; what it does not read now waits in its outbox."""
        for route in list(self._late):
            waiting = self._late.pop(route)
            while waiting and self._send_one(waiting[0]):
                waiting.popleft()
            if waiting:
                self._late[route] = waiting
        for message in outgoing:
            if message.route not in self._late and self._send_one(message):
                continue
            waiting = self._late.setdefault(message.route, deque())
            waiting.append(message)
            if len(waiting) > OUTBOX_MESSAGES:
                self._drop_peer(message.route)

    def _send_one(self, message: Outgoing) -> bool:
        """False if the peer does not read at present. One that is gone gets nothing; its session is void, so that it
        says hello when it is back, and if it does not, its silence ends it."""
        if not message.route:
            return True
        frames = wire.encode(message.message, message.arrays, message.session, message.sequence, message.protocol)
        try:
            sockets.send(self.socket, [message.route, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.info("a peer is gone before its %s", type(message.message).__name__)
            self.service.sessions.void(message.route)
        return True

    def _drop_peer(self, route: bytes) -> None:
        self._late.pop(route, None)
        for session in list(self.service.sessions.by_id.values()):
            if route in (session.data_route, session.control_route):
                self.service.end_session(session, "it does not read its messages", clock.now())

    def _on_signal(self, number: int, frame) -> None:
        self._leave_s = LEAVE_AFTER_SIGNAL_S
        self._signal = signal.Signals(number).name

    def close(self) -> None:
        with contextlib.suppress(JournalError):
            self._finish_sync()
            self.journal.sync()
            self.service.synced(self.service.recorder.mark())
        self.service.close(clock.now())
        if self.exporter:
            self.exporter.close()
            (self.config.run_dir / HTTP_FILE).unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        """Of its sockets, its threads and its journal."""
        if self.door:
            self.door.close()
        self.socket.close()
        self.context.term()
        self.journal.close()
        os.close(self._synced)


def probe_disk(folder: Path) -> None:
    """Raise OSError if there is no room for a while's records."""
    path = folder / "probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def start_exporter(config: Config) -> Exporter | None:
    """Serve /metrics and /health as `operations.http` says."""
    wanted = config.operations.http_address
    if wanted is None:
        return None
    try:
        exporter = Exporter(*wanted, config.operations.stuck_after_s)
    except OSError as error:
        raise BindError(
            f"key 'operations.http' = {config.operations.http!r} cannot be used ({error}); give a free address of "
            "this machine, or none"
        ) from None
    log.info("metrics and health at %s", exporter.address)
    if not is_loopback(wanted[0]):
        log.warning("%s can be read by whoever reaches this machine; it shows figures and names only", exporter.address)
    return exporter
