"""A TCP proxy that can let all its connections go dead without closing them."""

import contextlib
import selectors
import socket
import threading
import time

CHUNK_BYTES = 1 << 16
CONNECT_S = 20.0


class Proxy:
    """Forwards from `port` to a target. After `freeze` the connections of that moment stay open and carry nothing."""

    def __init__(self, host: str, port: int):
        self.target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._generation = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def freeze(self) -> None:
        self._generation += 1

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._connect, args=(near, self._generation), daemon=True).start()

    def _connect(self, near: socket.socket, generation: int) -> None:
        """A target that is down is waited for, so that nobody takes it for one that refuses."""
        deadline = time.monotonic() + CONNECT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return self._forward(near, socket.create_connection(self.target), generation)
            time.sleep(0.1)
        near.close()

    def _forward(self, near: socket.socket, far: socket.socket, generation: int) -> None:
        """Until one side closes; a frozen connection swallows what comes, and is closed with its client."""
        other = {near: far, far: near}
        with selectors.DefaultSelector() as selector, near, far, contextlib.suppress(OSError):
            for end in other:
                selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    data = key.fileobj.recv(CHUNK_BYTES)
                    frozen = generation != self._generation
                    if not data and (not frozen or key.fileobj is near):
                        return
                    if not data:
                        selector.unregister(far)
                    elif not frozen:
                        other[key.fileobj].sendall(data)
