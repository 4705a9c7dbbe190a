"""The server's side of CURVE: only keys on the allow-list come in, and whoever speaks is told apart by its key.

door = Door(context, keys, AllowList(folder / "allow-list"))
door.guard(socket)                  # before it is bound
frames = socket.recv_multipart(copy=False)
peer = door.peer_of(frames[0])
if door.watch():                    # now and then: some peers may have been added or revoked
    ...
"""

import threading
from collections import Counter

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from april.security.allow_list import AllowList, Peer
from april.security.audit import Audit
from april.security.keys import Keys

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""where libzmq asks whether a key may come in (ZeroMQ RFC 27)"""
DOMAIN = b"april"

FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken off",
}
CAUSES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "no keys",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "wrong broker key",
}


class Door:
    def __init__(self, context: zmq.Context, keys: Keys, allow_list: AllowList):
        self.keys = keys
        self.allow_list = allow_list
        self.failures: Counter[str] = Counter()
        """failed handshakes by cause: unknown key, wrong broker key, no keys, protocol, broken off"""
        self._list_seen = 0
        """changes of the allow-list that `watch` has told of; the handshakes' thread may have read them first"""
        self._audit = Audit()
        self._guarded: list[tuple[zmq.Socket, zmq.Socket]] = []
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        threading.Thread(target=self._answer, name="zap", daemon=True).start()

    def guard(self, socket: zmq.Socket) -> None:
        """Let only listed keys connect to `socket`, which is not bound yet. Without an answer nobody comes in."""
        socket.curve_server = True
        socket.curve_publickey = self.keys.public.encode()
        socket.curve_secretkey = self.keys.secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = socket.get_monitor_socket(sum(FAILURES))
        self._guarded.append((socket, monitor))

    def peer_of(self, frame: zmq.Frame) -> Peer:
        """Who has sent a message, from any of its frames."""
        return self.allow_list.find(str(frame.get("User-Id")))

    def watch(self) -> bool:
        """Count the handshakes that have failed; True if the allow-list has changed since the last call."""
        for _, monitor in self._guarded:
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                self._fail(CAUSES.get(event["value"], FAILURES[zmq.Event(event["event"])]))
        seen, self._list_seen = self._list_seen, self.allow_list.refresh()
        return self._list_seen != seen

    def _fail(self, cause: str, detail: str = "") -> None:
        self.failures[cause] += 1
        self._audit.say("a handshake has failed: %s%s", cause, detail)

    def close(self) -> None:
        """Close the monitors; the thread ends with the context."""
        for socket, monitor in self._guarded:
            socket.disable_monitor()
            monitor.close()

    # --- the thread that answers libzmq -------------------------------------------------------------------------

    def _answer(self) -> None:
        try:
            while True:
                self._zap.send_multipart(self._judge(*self._zap.recv_multipart()))
        except zmq.ContextTerminated:
            self._zap.close()

    def _judge(
        self, version: bytes, request: bytes, domain: bytes, address: bytes, routing_id: bytes, mechanism: bytes,
        *credentials: bytes,
    ) -> list[bytes]:  # fmt: skip
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        self.allow_list.refresh()
        if domain == DOMAIN and self.allow_list.find(key.decode()).role:
            return [version, request, b"200", b"", key, b""]
        self._fail("unknown key", f", {key.decode()} from {address.decode(errors='replace')}")
        return [version, request, b"400", b"not on the allow-list", b"", b""]
