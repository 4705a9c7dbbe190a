"""The broker's process: one thread, one poll loop, one ROUTER socket. Each pass handles messages, syncs the journal,
then sends the answers."""

import contextlib
import errno
import gc
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
from april.broker.images import ImageStore
from april.broker.inbox import Inbox
from april.broker.journal.files import JournalError, Unreadable, locate_journal, read_by_name
from april.broker.journal.journal import Journal
from april.broker.peers import Outgoing
from april.broker.prompts import PromptBook, open_prompts
from april.broker.service import KEY_OF, Service
from april.broker.views.metrics import Exporter, Histogram, MetricsSnapshot
from april.broker.views.status import RunStatus, read_status
from april.config import Config, is_loopback
from april.config.broker import IPC
from april.config.section import OFF
from april.util import clock, resources
from april.util.files import replace_file
from april.util.lifetime import STEP_ASIDE
from april.util.resources import NO_DESCRIPTORS, raise_descriptor_limit
from april.util.versions import RUN_FOLDER
from april.wire import limits
from april.wire.security.access import AccessControl
from april.wire.security.allow_list import AllowList
from april.wire.security.keygen import make_folder_once
from april.wire.security.keys import ALLOW_LIST, load_keys
from april.wire.sockets import base
from april.wire.sockets.base import ADDRESS_FILE, is_socket_file, remove_socket_folder, socket_address

log = logging.getLogger(__name__)


POLL_MS = 50
DRAIN_S = 0.004
"""Longest time for which messages are handled in one pass of the loop, seconds; then answers are sent."""
UNSYNCED_BYTES = 32 << 20
"""Number of journal bytes not yet on disk from which on the broker waits for the running sync before it handles more
messages."""
SMALL_SYNC_BYTES = 256 << 10
"""Syncs of up to this many bytes run in the loop, where they finish faster than in another thread."""
OUTBOX_MESSAGES = 1024
"""Most messages kept for a peer that does not read; with more, its session ends."""
HTTP_FILE = "http"
"""File in the run folder with the base URL of /metrics and /health."""
ZERO_COPY_RECV = 10
"""Number of a libzmq context option that pyzmq does not name. While it is on, every small waiting message keeps the 8
KB buffer it was received in."""
RETRY_S = 5.0
"""Interval at which a read-only broker tries to write again."""
PROBE_BYTES = 16 << 20
"""Bytes that must fit on the disk before a read-only broker resumes."""
RECOVERABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *NO_DESCRIPTORS)
"""Error numbers of failed writes of the journal after which writing may become possible again."""
BIND_S, BIND_AGAIN_S = 10.0, 0.2
"""Longest time for which the broker tries to bind the port that a killed broker of the run had, and interval of its
attempts, seconds."""
LEAVE_S = 600.0
"""Longest wait for the goodbyes of all peers at the end of a run, seconds; `learner.load_s` counts if it is longer."""
LEAVE_AFTER_SIGNAL_S = 60.0
"""Longest wait for the goodbyes of all peers if a signal has ended the run, seconds."""


class BindError(RuntimeError):
    """The broker cannot use one of its addresses; the message names the configuration key and the reason."""


class Server:
    """Serves one run from start to end.

    server = Server(config)
    server.serve()          # returns when the run is over, or after a signal
    """

    def __init__(self, config: Config):
        """Raises ConfigError, JournalError or BindError."""
        raise_descriptor_limit()
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if config.made_keys:
            make_folder_once(config.made_keys)
        keys = load_keys(config.keys, "broker")
        allow_list = AllowList(config.keys / ALLOW_LIST) if config.keys else None
        new = not (config.run_dir / "config.toml").exists()
        RUN_FOLDER.claim(config.run_dir, new)
        if new:
            replace_file(config.run_dir / "config.toml", config.to_toml().encode())
        self.config = config
        self.access_control: AccessControl | None = None
        """Admits only peers on the allow-list; None without CURVE keys."""
        self._synced = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Event file descriptor that becomes readable when a sync has ended."""
        self._open(open_prompts(config, ImageStore(config.run_dir)))
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
            self.access_control = AccessControl(self.context, keys, allow_list)
            self.access_control.guard(self.socket)
            self.service.context.failed_handshakes = self.access_control.failures
        self.inbox = Inbox(self.socket)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._synced, zmq.POLLIN)
        self.address_file: Path = config.run_dir / ADDRESS_FILE
        try:
            self._bind(config.broker.bind)
            self.exporter = start_exporter(config)
        except BaseException:
            self._release()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._syncs = Histogram()
        """Histogram of the durations of the journal's syncs since the broker started."""
        self._leave_s = max(LEAVE_S, config.learner.load_s)
        self._signal = ""
        self._trimmer = HeapTrimmer()
        self._retry_at = 0.0
        self._unread: Unreadable | None = None
        """The refused read of the journal for which the broker is read-only; None if it is not, or for another
        error."""
        self._ended: tuple[str, str] | None = None
        """(reason, final state) of a run that was over while its broker was read-only, so that the run is ended again
        after the recovery; None otherwise."""
        self._unsent: list[Outgoing] = []
        """Answers that wait for the end of the running sync."""
        self._in_sync = self.service.recorder.sync_mark()
        """What the running sync puts on disk: the counts of tokens accepted, and the lines of metrics.jsonl that
        waited, when it began."""
        self._outboxes: dict[bytes, deque[Outgoing]] = {}
        """Messages, by the peer's route, that could not be sent yet, since the peer does not read and its queue is
        full. They are sent before any later ones."""

    def _open(self, prompts: PromptBook) -> None:
        """Open the journal and rebuild the service from it."""
        broker = self.config.broker
        folder = locate_journal(self.config.run_dir, broker.journal_dir)
        self.journal = Journal(folder, broker.journal_file_mb << 20, broker.journal_file_records)
        self.journal.on_sync_ended = partial(os.eventfd_write, self._synced, 1)
        self.service = Service(self.config, prompts, self.journal, clock.now())
        if self.access_control:
            self.service.context.failed_handshakes = self.access_control.failures
        self.journal.sync()

    def _bind(self, endpoint: str) -> None:
        """Bind the socket to `endpoint`. If the configuration allows any port or socket file, take that of the run's
        last broker, as peers reconnect to it.

        Raises BindError.
        """
        fix = "give a free one of this machine"
        deadline = clock.now()
        last = self.address_file.read_text() if self.address_file.exists() else ""
        if endpoint == IPC:
            try:
                endpoint = socket_address(last)
            except OSError as error:
                raise BindError(f"key 'broker.bind' = {IPC!r} cannot be used ({error}); mend that folder") from None
        elif endpoint.endswith(":*") and last.startswith("tcp:"):
            endpoint = endpoint[:-1] + last.rpartition(":")[2]
            fix = f"the run's peers look for it there: free it, or remove {self.address_file} if none is left"
            deadline += BIND_S
        while True:
            try:
                self.socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if clock.now() >= deadline:
                    raise BindError(f"key 'broker.bind' = {endpoint!r} cannot be used ({error}); {fix}") from None
            time.sleep(BIND_AGAIN_S)

    def serve(self) -> None:
        """Serve until the run is over and all peers have left, or a signal tells the broker to exit for its
        successor."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(STEP_ASIDE, self._on_signal)
        self.write_address()
        log.info("broker of run %s at %s", self.service.config.run.name, self.address)
        if self.config.security.keys == OFF and not is_socket_file(self.address):
            can = "can read prompts, hand in tokens, choose weights and stop the run"
            log.warning("security.keys = 'off': whoever reaches %s %s", self.address, can)
        over_since = None
        apply_memory_settings()
        self.service.begin(clock.now())
        self.service.verifier.start()
        try:
            while over_since is None or clock.now() - over_since < self._leave_s:
                self.serve_once()
                if self.steps_aside:
                    why = self.service.run.read_only or ("drained" if self.service.ledger.rounds.draining else "synced")
                    return log.info("told to leave by %s, %s: peers wait for the next broker", self._signal, why)
                if self.service.everyone_left():
                    break
                if self.service.run.over and over_since is None:
                    over_since = clock.now()
            self.address_file.unlink(missing_ok=True)
        finally:
            self.close()
        remove_socket_folder(self.address)

    def write_address(self) -> None:
        """Write the addresses of broker and HTTP server to the run folder; called once signal handlers are set."""
        replace_file(self.address_file, self.address.encode())
        if self.exporter:
            replace_file(self.config.run_dir / HTTP_FILE, self.exporter.address.encode())

    @property
    def steps_aside(self) -> bool:
        """Whether the broker process exits without ending the run, so that another broker can continue it from the
        journal: after a signal to step aside, or after a signal to exit while drained or read-only."""
        run = self.service.run
        aside = self._signal == STEP_ASIDE.name or self.service.ledger.rounds.draining
        return bool(self._signal and (run.read_only or (aside and not run.over)))

    def serve_once(self) -> None:
        """Handle the messages that have arrived, and send the answers that a sync has covered.

        Messages are handled while a sync runs as well; the answers to those wait for the next sync.
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
            self.exporter.passed(clock.now(), self._take_snapshot)
        self._trimmer.trim_if_due()

    def _wait(self, timeout_ms: int) -> None:
        """Wait, `timeout_ms` at most, for a message to arrive, or for the running sync to end."""
        while ready := dict(self._poller.poll(timeout_ms)):
            if self._synced in ready:
                os.eventfd_read(self._synced)
            if self.socket in ready or self.journal.syncing:
                return

    def _work(self) -> None:
        caught_up = self._drain()
        if self.access_control and self.access_control.watch() and not self.service.run.read_only:
            self._end_revoked()
        if self._signal and not self.steps_aside:
            self.service.stop(f"signal {self._signal}", "stopped", clock.now())
        self.service.tick(clock.now(), caught_up)
        self._send(self.service.peers.take_immediate())
        if self.service.run.read_only:
            return self._send(self.service.peers.take_outgoing())
        if self.journal.sync_runs and self.journal.unsynced_bytes < UNSYNCED_BYTES:
            return
        self._finish_sync()
        self._unsent = self.service.peers.take_outgoing()
        self._in_sync = self.service.recorder.sync_mark()
        in_thread = self.journal.unsynced_bytes > SMALL_SYNC_BYTES or self.inbox.has_message
        self.journal.begin_sync(in_thread=in_thread and not self.journal.file_full)
        if not self.journal.sync_runs:
            self._finish_sync()
            self.service.end_file()

    def _finish_sync(self) -> None:
        """Wait for the running sync to end, and send the answers that it covers."""
        if self.journal.syncing:
            self.journal.finish_sync()
            self._syncs = self._syncs.add(self.journal.sync_s)
            self.service.synced(self._in_sync)
        unsent, self._unsent = self._unsent, []
        self._send(unsent)

    def _take_snapshot(self, before: RunStatus | None) -> MetricsSnapshot:
        run = read_status(self.service.context, clock.now(), bottleneck=False)
        return MetricsSnapshot(run, before, sum(map(len, self._outboxes.values())), self._syncs)

    def _fail(self, error: JournalError | OSError) -> None:
        """Become read-only after an error: acknowledge nothing, and answer status requests.

        After a failed write of the journal, that lasts until writing is possible again, or until the broker is
        restarted. After another failed call the journal on disk is intact: the broker tries to go on from it
        (`_recover`).
        """
        if self._retry_at == math.inf:  # a write has failed for good; what fails after it mends nothing
            log.error("%s", error)
            return
        is_other = isinstance(error, OSError | Unreadable)
        self._unread = error if isinstance(error, Unreadable) else None
        if isinstance(error, OSError):
            error = JournalError(f"a call of the broker has failed ({error}); it goes on from its journal")
        if is_other:
            log.warning("what failed was no write of the journal", exc_info=True)
            self.journal.give_up(error)
        self.service.peers.outgoing[:0], self._unsent = self._unsent, []
        self.service.enter_read_only(str(error))
        self._retry_at = clock.now() + RETRY_S if is_other or error.errno in RECOVERABLE else math.inf

    def _recover(self) -> None:
        """Test whether the disk can be written, and whether the read that was refused works now. If so, rebuild the
        state from the journal as after a crash, and serve again; the peers say hello again."""
        self._retry_at = clock.now() + RETRY_S
        if self.service.run.over:
            self._ended = self.service.run.over, self.service.run.state
        try:
            probe_disk(self.journal.folder)
            if self._unread:
                read_by_name(self._unread.path, self._unread.size, self._unread.offset)
            self.journal.close()
            self.service.note.close()
            self.service.verifier.close()
            self.service.snapshots.close()
            self.service.recorder.metrics_file.write()
            self._open(self.service.prompts)
        except (JournalError, OSError) as error:
            log.error("there is still no going on: %s", error)
        else:
            self.service.begin(clock.now())
            if self._ended:
                self.service.stop(*self._ended, clock.now())
            log.warning("the journal can be written again; going on as start %d", self.service.ledger.serials.starts)

    def _drain(self) -> bool:
        """Handle messages for up to `DRAIN_S`, and send the immediate answers; True if no message is left."""
        until = clock.now() + DRAIN_S
        while (now := clock.now()) < until and (arrived := self.inbox.next(self.service.peers.by_id)):
            route, *frames = arrived
            key_owner = self.access_control.peer_of(route) if self.access_control else None
            self.service.handle(route.bytes, frames, now, key_owner)
        self._send(self.service.peers.take_immediate())
        return now < until

    def _end_revoked(self) -> None:
        """End the sessions of peers whose key has been removed from the allow-list, or is listed there with another
        role."""
        for peer in list(self.service.peers.by_id.values()):
            role = KEY_OF.get(peer.role, peer.role)
            if self.access_control and self.access_control.allow_list.find(peer.key).role != role:
                self.service.end_session(peer, "its key is off the allow-list", clock.now())

    def _send(self, outgoing: list[Outgoing]) -> None:
        """Send messages, behind those in their peer's outbox; messages that a peer does not read now are kept in its
        outbox."""
        for route in list(self._outboxes):
            outbox = self._outboxes.pop(route)
            while outbox and self._send_one(outbox[0]):
                outbox.popleft()
            if outbox:
                self._outboxes[route] = outbox
        for message in outgoing:
            if message.route not in self._outboxes and self._send_one(message):
                continue
            outbox = self._outboxes.setdefault(message.route, deque())
            outbox.append(message)
            if len(outbox) > OUTBOX_MESSAGES:
                self._drop_peer(message.route)

    def _send_one(self, message: Outgoing) -> bool:
        """Send one message; False if the peer does not read at present.

        If the peer is gone, the message is dropped, and the session's routes are forgotten until the peer says hello or
        times out.
        """
        if not message.route:
            return True
        frames = wire.encode(message.message, message.arrays, message.session, message.sequence, message.protocol)
        try:
            base.send(self.socket, [message.route, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.info("a peer is gone before its %s", type(message.message).__name__)
            self.service.peers.invalidate(message.route)
        return True

    def _drop_peer(self, route: bytes) -> None:
        """End the session of the peer at `route`, whose outbox is full, as it does not read its messages."""
        self._outboxes.pop(route, None)
        for peer in list(self.service.peers.by_id.values()):
            if route in (peer.data_route, peer.control_route):
                self.service.end_session(peer, "it does not read its messages", clock.now())

    def _on_signal(self, number: int, frame) -> None:
        self._leave_s = LEAVE_AFTER_SIGNAL_S
        self._signal = signal.Signals(number).name

    def close(self) -> None:
        with contextlib.suppress(JournalError):
            self._finish_sync()
            self.journal.sync()
            self.service.synced(self.service.recorder.sync_mark())
        self.service.close(clock.now())
        if self.exporter:
            self.exporter.close()
            (self.config.run_dir / HTTP_FILE).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        """Close the sockets, threads and journal."""
        if self.access_control:
            self.access_control.close()
        self.socket.close()
        self.context.term()
        self.journal.close()
        self.service.prompts.close()
        os.close(self._synced)


def probe_disk(folder: Path) -> None:
    """Check that `PROBE_BYTES` can be written to the disk of `folder`. Raises OSError."""
    path = folder / "probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def start_exporter(config: Config) -> Exporter | None:
    """Start the HTTP server of /metrics and /health at `operations.http`; None if that is `none`. Raises BindError."""
    wanted = config.operations.http_address
    if wanted is None:
        return None
    try:
        exporter = Exporter(*wanted, config.operations.stuck_after_s, config.operations.http_hosts)
    except OSError as error:
        raise BindError(
            f"key 'operations.http' = {config.operations.http!r} cannot be used ({error}); give a free address of "
            "this machine, or none"
        ) from None
    log.info("metrics and health at %s", exporter.address)
    if not is_loopback(wanted[0]):
        log.warning("%s can be read by whoever reaches this machine; it shows figures and names only", exporter.address)
    return exporter


# --- memory settings --------------------------------------------------------------------------------------------------


GC_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of Python's garbage collector, above its defaults: scanning the ledger's many live objects is rarely worth
it."""
LARGE_BLOCK_BYTES = 1 << 20
KEPT_FREE_BYTES = 64 << 20
TRIM_S, TRIM_SHARE = 5.0, 0.001
"""Least seconds between two returns of free memory to the system, and the largest share of time that they may take."""


def apply_memory_settings() -> None:
    """Set the process's garbage collection and malloc options; call it once everything is loaded.

    The broker's heap has many small long-lived objects and a few large short-lived ones.

    glibc maps large blocks separately and returns them to the system when freed, but raises its threshold for "large"
    with each one freed, so that large messages would soon fragment the heap. Here the threshold stays at
    `LARGE_BLOCK_BYTES`. Up to `KEPT_FREE_BYTES` at the end of the heap are kept; otherwise the pages of messages would
    be released and faulted in again for each message.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    resources.tune_allocator(LARGE_BLOCK_BYTES, KEPT_FREE_BYTES)


class HeapTrimmer:
    """Returns free memory between live objects to the system, tens of megabytes after each batch.

    A call takes a millisecond or two; with a larger heap, where it takes longer, calls are less frequent.
    """

    def __init__(self) -> None:
        self._at = 0.0

    def trim_if_due(self) -> None:
        """Return free memory to the system if `TRIM_S` and `TRIM_SHARE` permit; call it in each pass of the broker's
        loop."""
        if (began := clock.now()) >= self._at:
            resources.return_free_pages()
            now = clock.now()
            self._at = now + max(TRIM_S, (now - began) / TRIM_SHARE)
