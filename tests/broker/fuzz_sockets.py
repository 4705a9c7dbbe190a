"""The fuzzer's attacks over real sockets on a real server with CURVE, from a worker that has a valid key and misuses
it."""

import random
import socket
import time
import uuid

import zmq
from zmq.utils.monitor import recv_monitor_message

from april import wire
from april.wire import limits
from april.wire.security import keygen
from april.wire.security.keys import load_keys
from april.wire.sockets.broker import BrokerConnection
from tests.broker.arena import Arena, digest
from tests.broker.hostile import Attacker
from tests.support.serving_broker import serving

PATIENCE_S = 60.0
WINDOW = 100
"""Number of messages sent before their answers are awaited."""


def renamed(config, name):
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def fuzz_sockets(config, messages, folder, seed=0):
    """Send `messages` attacks over a socket; returns the number of refusals by cause."""
    keygen.make_folder(folder / "keys")
    on_tcp = {"broker": config.broker.model_copy(update={"bind": "tcp://127.0.0.1:*"})}
    secured = renamed(config, "live").with_keys(folder / "keys").model_copy(update=on_tcp)
    chance = random.Random(seed)
    attacker = Attacker(Arena(renamed(config, "material"), chance), chance)
    with serving(secured) as server:
        keys = load_keys(folder / "keys", "monitor")
        monitor = BrokerConnection(server.address, "monitor", "m", uuid.uuid4().hex, PATIENCE_S, keys)
        monitor.hello([])
        before = digest(server.service.ledger)
        bad_worker = Raw(server.address, load_keys(folder / "keys", "worker"))
        sent = 0
        while sent < messages:
            _, frames, peer, answer = attacker.attack()
            if frames and peer is None and answer == "refused":
                bad_worker.send(frames)
                sent += 1
                if sent % WINDOW == 0:
                    bad_worker.await_refusals(sent)
                    attacker.arena.progress()
        bad_worker.await_refusals(sent)
        refusals = server.service.peers.refusals.copy()
        assert refusals.total() == sent, refusals
        send_garbage(server, chance)
        bad_worker.send([b"x" * (limits.FROM_PEER.frame_bytes + 1)])
        bad_worker.await_reconnection()
        bad_worker.send([b"still here"])
        bad_worker.await_refusals(sent + 1)
        assert monitor.request(wire.StatusRequest(), PATIENCE_S).arrays
        assert digest(server.service.ledger) == before, "the ledger has changed"
        bad_worker.close()
        monitor.close()
    return refusals


def send_garbage(server, chance):
    """Open TCP connections that send bytes which are not ZeroMQ, or a ZeroMQ greeting without keys; close half of them,
    leave half open."""
    host, port = server.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\x00")
    left_open = []
    for _ in range(10):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + chance.randbytes(200), chance.randbytes(64), greeting):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(garbage)
            if chance.random() < 0.5:
                left_open.append(connection)
            else:
                connection.close()
    deadline = time.monotonic() + PATIENCE_S
    while not server.access_control.failures.total():
        assert time.monotonic() < deadline, "no failed handshake was counted"
        time.sleep(0.01)
    for connection in left_open:
        connection.close()


class Raw:
    """A DEALER connection with a key that sends arbitrary frames."""

    def __init__(self, address, keys):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_publickey = keys.public.encode()
        self.socket.curve_secretkey = keys.secret.encode()
        self.socket.curve_serverkey = keys.broker.encode()
        self.events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(address)
        self.refused = 0

    def send(self, frames):
        self.socket.send_multipart(frames)

    def await_refusals(self, count):
        """Wait until each of the `count` messages sent so far has been answered by a refusal."""
        while self.refused < count:
            assert self.socket.poll(PATIENCE_S * 1000), f"{self.refused} answers to {count} messages"
            header, *frames = self.socket.recv_multipart()
            in_any_protocol = header[:2] + bytes([wire.PROTOCOL]) + header[3:]
            assert isinstance(wire.decode([in_any_protocol, *frames]).message, wire.Refused)
            self.refused += 1

    def await_reconnection(self):
        """Wait until the server has closed the connection and accepted a new one."""
        seen = []
        while seen[-2:] != [zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED]:
            assert self.events.poll(PATIENCE_S * 1000), "the connection goes on"
            seen.append(recv_monitor_message(self.events)["event"])

    def close(self):
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close()
        self.context.term()
