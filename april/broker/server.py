"""The broker's process: one thread, one poll loop, one ROUTER. Drain, apply, sync, and only then answer."""

import contextlib
import logging
import signal
from collections import deque
from pathlib import Path

import zmq

from april import clock, limits, wire
from april.broker.journal import Journal
from april.broker.prompts import PromptBook
from april.broker.recorder import replace_file
from april.broker.service import Service
from april.broker.sessions import Outgoing
from april.config import Config
from april.security.allow_list import AllowList
from april.security.door import Door
from april.security.keys import ALLOW_LIST, load_keys

log = logging.getLogger(__name__)

POLL_MS = 50
DRAIN_MESSAGES = 256
"""most messages between two syncs"""
OUTBOX_MESSAGES = 1024
"""most messages kept for a peer that does not read; more end its session"""
LEAVE_S = 600.0
"""longest wait at the end of a run for workers and learner to say goodbye"""
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
        keys = load_keys(config.security.keys, "broker")
        allow_list = AllowList(config.security.keys / ALLOW_LIST) if keys else None
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(config.run_dir / "journal")
        self.service = Service(config, PromptBook(config), self.journal, clock.now())
        self.journal.sync()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_S * 1000))
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.FROM_PEER.frame_bytes)
        self.socket.setsockopt(zmq.RCVHWM, limits.UPLOAD_QUEUE_MESSAGES)
        self.door = Door(self.context, keys, allow_list) if keys else None
        if self.door:
            self.door.guard(self.socket)
            self.service.failed_handshakes = self.door.failures
        try:
            self.socket.bind(config.broker.bind)
        except zmq.ZMQError as error:
            raise BindError(
                f"key 'broker.bind' = {config.broker.bind!r} cannot be used ({error}); give a free one of this machine"
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address_file: Path = config.run_dir / "address"
        replace_file(self.address_file, self.address.encode())
        self._leave_s = LEAVE_S
        self._signal = ""
        self._late: dict[bytes, deque[Outgoing]] = {}

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        log.info("broker of run %s at %s", self.service.config.run.name, self.address)
        over_since = None
        try:
            while over_since is None or clock.now() - over_since < self._leave_s:
                self.turn()
                if self.service.everyone_left():
                    break
                if self.service.over and over_since is None:
                    over_since = clock.now()
        finally:
            self.close()

    def turn(self) -> None:
        """One drain of the socket, one sync, the answers."""
        caught_up = not self.socket.poll(POLL_MS) or self._drain()
        if self.door and self.door.watch():
            self._end_revoked()
        if self._signal:
            self.service.stop(f"signal {self._signal}", "stopped", clock.now())
        self.service.tick(clock.now(), caught_up)
        self.journal.sync()
        self._send_all()

    def _drain(self) -> bool:
        """Handle what has arrived; True if nothing is left."""
        for _ in range(DRAIN_MESSAGES):
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            peer = self.door.peer_of(route) if self.door else None
            self.service.handle(route.bytes, frames, clock.now(), peer)
        return False

    def _end_revoked(self) -> None:
        """End the sessions of keys that are not on the allow-list any more, or have another role there."""
        for session in list(self.service.sessions.by_id.values()):
            if self.door.allow_list.find(session.key).role != session.role:
                self.service.end_session(session, "its key is off the allow-list", clock.now())

    def _send_all(self) -> None:
        for route in list(self._late):
            waiting = self._late.pop(route)
            while waiting and self._send(waiting[0]):
                waiting.popleft()
            if waiting:
                self._late[route] = waiting
        outgoing, self.service.sessions.outgoing = self.service.sessions.outgoing, []
        for message in outgoing:
            waiting = self._late.get(message.route)
            if waiting is None and self._send(message):
                continue
            waiting = self._late.setdefault(message.route, deque())
            waiting.append(message)
            if len(waiting) > OUTBOX_MESSAGES:
                self._drop_peer(message.route)

    def _send(self, message: Outgoing) -> bool:
        """False if the peer does not read at present. One that is gone gets nothing: it says hello when it is back,
        and if it does not, its silence ends its session."""
        frames = wire.encode(message.message, message.arrays, message.session, message.sequence)
        try:
            self.socket.send_multipart([message.route, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.info("a peer is gone before its %s", type(message.message).__name__)
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
        self.service.close(clock.now())
        with contextlib.suppress(FileNotFoundError):
            self.address_file.unlink()
        if self.door:
            self.door.close()
        self.socket.close()
        self.context.term()
        self.journal.close()
