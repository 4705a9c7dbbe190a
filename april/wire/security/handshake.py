"""The peer's side of CURVE: sets keys on a socket, and turns a failed handshake into a sentence instead of a hang."""

import zmq
from zmq.utils.monitor import recv_monitor_message

from april.util import clock
from april.wire.security.keys import Keys

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
PATIENCE_S, PATIENCE_ATTEMPTS = 3.0, 3
"""A server that breaks off this many handshakes within this many seconds, and has never admitted the peer, is taken to
have other keys. A server that dies breaks off only once."""

UNLISTED = "its key is not on the allow-list; add it with `april keygen FOLDER --role ROLE --name NAME`"
OTHER_KEYS = "the other side has other keys than 'security.keys' says; give the key file made in its folder"
WITHOUT_KEYS = "this side has no keys and the other side may want them; set 'security.keys'"
WITH_KEYS = "only one side has keys; set 'security.keys' on both or on none"


class Handshake:
    """Watches the connection attempts of a socket. Create it before the socket is connected.

    handshake = Handshake(socket, keys, server=keys.broker)
    socket.connect(address)
    if problem := handshake.problem():
        raise ...
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: Keys | None, server: str = ""):
        """`server`: CURVE public key of the server that the socket connects to."""
        if keys:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = server.encode()
        self._socket = socket
        self._has_keys = keys is not None
        self._monitor = socket.get_monitor_socket(EVENTS)
        self._succeeded = False
        self._failures: list[float] = []
        """Times of failed handshakes (Unix time, seconds)."""

    def problem(self) -> str:
        """Reason for which the socket cannot connect, as a sentence; "" while it still may."""
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
