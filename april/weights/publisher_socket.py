"""The socket at which workers ask a publisher for weight channels, and its thread: the only one that touches it."""

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from april import wire
from april.util.lifetime import PartThread
from april.weights.channel import (
    CHANNEL_BODIES,
    CLOSED,
    ChannelAlive,
    ChannelFailed,
    ChannelJoin,
    ChannelLinked,
    ChannelLoaded,
    ChannelPosted,
    ChannelReady,
)
from april.wire import limits
from april.wire.security.access import AccessControl, Audit
from april.wire.security.allow_list import AllowList, KeyOwner
from april.wire.security.keys import ALLOW_LIST, load_keys
from april.wire.sockets.base import is_socket_file, socket_beside

FROM_WORKERS = (ChannelJoin, ChannelReady, ChannelAlive, ChannelLinked, ChannelPosted, ChannelLoaded, ChannelFailed)
ANYBODY = KeyOwner("", "worker", "")
"""Stands for the sender of each message in a run without keys, in which senders are not known."""


class PublisherSocket:
    """Receives workers' messages in a thread, and sends them others that any thread queues."""

    def __init__(
        self,
        host: str,
        keys: Path | None,
        broker: str,
        received: Callable[[bytes, wire.Message, KeyOwner], None],
        tick: Callable[[], None],
    ):
        """`host`: host name or address to listen at. `keys`: folder with the learner's CURVE keys and the allow-list;
        None: without keys. `broker`: the broker's address; if that is a Unix socket, this socket is one in the same
        folder, else TCP. `received(route, message, peer)` is called for each message that a worker may send. `tick` is
        called once all messages that have arrived are handled, and every half second. Raises ConfigError."""
        own = load_keys(keys, "learner")
        allow_list = AllowList(keys / ALLOW_LIST) if keys else None
        self._received, self._tick = received, tick
        self.audit = Audit()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_S * 1000))
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.FROM_PEER.frame_bytes)
        self._socket.setsockopt(zmq.RCVHWM, limits.UPLOAD_QUEUE_MESSAGES)
        self._access = AccessControl(self._context, own, allow_list) if own and allow_list else None
        if self._access:
            self._access.guard(self._socket)
        self._socket.bind(socket_beside(broker, "weights") if is_socket_file(broker) else f"tcp://{host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._outbox: queue.SimpleQueue[tuple[bytes, wire.Message]] = queue.SimpleQueue()
        self._closed = False
        self._wake_reader, self._wake_writer = os.pipe()
        self.thread: threading.Thread = PartThread("weights-control", self._serve)

    def start(self) -> None:
        self.thread.start()

    def send(self, route: bytes, message: wire.Message) -> None:
        self._outbox.put((route, message))
        if self._wake_writer != CLOSED:
            os.write(self._wake_writer, b"x")

    def allows(self, key: str) -> bool:
        """Whether the allow-list has this CURVE public key as a worker's; True in a run without keys."""
        return self._access is None or self._access.allow_list.find(key).role == "worker"

    def close(self) -> None:
        """Tell the thread to end; does not wait for it."""
        self._closed = True
        if self._wake_writer != CLOSED:
            os.write(self._wake_writer, b"x")

    def free(self) -> None:
        """Close the descriptors of the wake-up pipe, once all threads have ended."""
        if self._wake_writer != CLOSED:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_writer = CLOSED

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(500))
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
            while self._socket.poll(0):
                route, *frames = self._socket.recv_multipart(copy=False)
                self._receive(route.bytes, frames, self._access.peer_of(route) if self._access else ANYBODY)
            while not self._outbox.empty():
                to, message = self._outbox.get()
                self._socket.send_multipart([to, *wire.encode(message)])
            if self._access:
                self._access.watch()
            self._tick()
        if self._access:
            self._access.close()
        self._socket.close()
        self._context.term()

    def _receive(self, route: bytes, frames: list, peer: KeyOwner) -> None:
        try:
            message = wire.decode(frames, limits.FROM_PEER, CHANNEL_BODIES).message
            if peer.role != "worker" or not isinstance(message, FROM_WORKERS):
                raise wire.WireError("not for this peer to send")
        except wire.WireError as error:
            self.audit.warn("bad message about weights: %s", error)
            return
        self._received(route, message, peer)
