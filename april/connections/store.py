"""torch's key-value stores, in which ranks and workers find each other, bound to one address: by itself a `TCPStore`
listens on every interface, whatever host it is given, and lets anybody in."""

import socket
from datetime import timedelta

import torch.distributed as dist


def serve(host: str) -> dist.TCPStore:
    """A store at `host` and a free port; others of this process for that port share it. Raises OSError."""
    return serve_at(socket.create_server((host, 0)))


def serve_at(listener: socket.socket) -> dist.TCPStore:
    """A store that takes over a listening socket."""
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client; threads that wait need one each, because a waiting client blocks its other calls."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
