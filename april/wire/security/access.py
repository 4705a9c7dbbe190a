"""Both sides of CURVE. A server admits only keys on the allow-list, identifies senders by their keys, and logs refusals
at a limited rate; a peer turns a failed handshake into a sentence instead of a hang.

access = AccessControl(context, keys, AllowList(folder / "allow-list"))
access.guard(socket)                # before it is bound
frames = socket.recv_multipart(copy=False)
peer = access.peer_of(frames[0])
if access.watch():                  # regularly: True if keys may have been added or revoked
    ...
"""

import logging
from collections import Counter

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from april.util import clock
from april.util.lifetime import PartThread
from april.wire.security.allow_list import AllowList, KeyOwner
from april.wire.security.keys import Keys

log = logging.getLogger(__name__)

LINES_A_MINUTE = 60
"""Maximum number of refusals that are logged in a minute; further ones are only counted."""


class Audit:
    """Logs refusals at a limited rate, so that no peer can fill the disk.

    Two threads may share an instance; the limit is then exceeded by one line at most.
    """

    def __init__(self) -> None:
        self._minute = 0
        self._lines = 0
        self._suppressed = 0

    def warn(self, text: str, *arguments: object) -> None:
        minute = int(clock.now() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines > LINES_A_MINUTE:
            self._suppressed += 1
            return
        if self._suppressed:
            log.warning("%d refusals were not logged", self._suppressed)
            self._suppressed = 0
        log.warning(text, *arguments)


ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""In-process address at which libzmq asks, for each handshake, whether a key is admitted (ZAP, ZeroMQ RFC 27)."""
DOMAIN = b"april"

FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken off",
}
CAUSES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "no keys",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "wrong broker key",
}


class AccessControl:
    """Admits listed keys to the guarded sockets of a ZeroMQ context, and counts failed handshakes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, allow_list: AllowList):
        self.keys = keys
        self.allow_list = allow_list
        self.failures: Counter[str] = Counter()
        """Number of failed handshakes by cause: unknown key, wrong broker key, no keys, protocol, broken off."""
        self._reported_changes = 0
        """Number of changes of the allow-list, since the start, that `watch` has reported so far. The thread that
        answers handshakes may have read newer ones."""
        self._audit = Audit()
        self._guarded: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        PartThread("zap", self._serve_zap).start()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Admit only listed keys to `socket`, which must not be bound yet. Nobody is admitted unless the ZAP thread
        answers."""
        socket.curve_server = True
        socket.curve_publickey = self.keys.public.encode()
        socket.curve_secretkey = self.keys.secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = socket.get_monitor_socket(sum(FAILURES))
        self._guarded.append((socket, monitor))

    def peer_of(self, frame: zmq.Frame) -> KeyOwner:
        """The sender of a message, identified by the key of its connection; any frame of the message will do."""
        return self.allow_list.find(str(frame.get("User-Id")))

    def watch(self) -> bool:
        """Count the handshakes that have failed since the last call, and read the allow-list again if its file has
        changed. Returns whether the list has changed since the last call."""
        for _, monitor in self._guarded:
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                self._fail(CAUSES.get(event["value"], FAILURES[zmq.Event(event["event"])]))
        reported, self._reported_changes = self._reported_changes, self.allow_list.refresh()
        return self._reported_changes != reported

    def _fail(self, cause: str, detail: str = "") -> None:
        self.failures[cause] += 1
        self._audit.warn("a handshake has failed: %s%s", cause, detail)

    def close(self) -> None:
        """Close the monitor sockets; the ZAP thread ends with the context."""
        for socket, monitor in self._guarded:
            socket.disable_monitor()
            monitor.close()

    # --- the thread that answers libzmq -------------------------------------------------------------------------

    def _serve_zap(self) -> None:
        try:
            while True:
                self._zap.send_multipart(self._authenticate(*self._zap.recv_multipart()))
        except zmq.ContextTerminated:
            self._zap.close()

    def _authenticate(
        self, version: bytes, request: bytes, domain: bytes, address: bytes, routing_id: bytes, mechanism: bytes,
        *credentials: bytes,
    ) -> list[bytes]:  # fmt: skip
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        self.allow_list.refresh()
        if domain == DOMAIN and self.allow_list.find(key.decode()).role:
            return [version, request, b"200", b"", key, b""]
        self._fail("unknown key", f", {key.decode()} from {address.decode(errors='replace')}")
        return [version, request, b"400", b"not on the allow-list", b"", b""]


# --- the peer's side ------------------------------------------------------------------------------------------------

HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
PATIENCE_S, PATIENCE_ATTEMPTS = 3.0, 3
"""Seconds and number of handshakes. A server that has never admitted the peer, and breaks off at least so many
handshakes over at least so many seconds, is taken to have other keys. A server that dies breaks off only once."""

UNLISTED = "its key is not on the allow-list; add it with `april keygen FOLDER --role ROLE --name NAME`"
OTHER_KEYS = (
    "the other side has other keys than 'security.keys' says, or is another run; connect by the run's folder, or give "
    "the key file made there"
)
WITHOUT_KEYS = "this side has no keys and the other side may want them; set 'security.keys'"
WITH_KEYS = "only one side has keys; set 'security.keys' on both or on none"


class Handshake:
    """Watches the connection attempts of a socket. Create it before the socket is connected, and ask it now and then:
    `problem` does not wait, and says what the attempts so far have shown.

    handshake = Handshake(socket, keys, server=keys.broker)
    socket.connect(address)
    while waiting_for_an_answer:
        if problem := handshake.problem():  # a sentence; "" as long as the socket may still connect
            raise ...
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: Keys | None, server: str = ""):
        """`keys`: this side's CURVE keys; None: the socket uses no CURVE. `server`: CURVE public key of the server that
        the socket connects to."""
        if keys:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server.encode()
        self._socket = socket
        self._has_keys = keys is not None
        self._monitor = socket.get_monitor_socket(HANDSHAKE_EVENTS)
        self._succeeded = False
        self._failures: list[float] = []
        """Times of failed handshakes (Unix time, seconds)."""

    def problem(self) -> str:
        """Sentence that says why the socket cannot connect, once its handshakes show that; "" as long as it still may
        connect."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._succeeded = True
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return UNLISTED
            elif event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return WITH_KEYS
            elif not self._succeeded:
                self._failures.append(clock.now())
        if self._succeeded or len(self._failures) < PATIENCE_ATTEMPTS:
            return ""
        if self._failures[-1] - self._failures[0] < PATIENCE_S:
            return ""
        return OTHER_KEYS if self._has_keys else WITHOUT_KEYS

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
