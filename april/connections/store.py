"""torch's `TCPStore`, the rendezvous of ranks and workers, bound to one address.

By itself a `TCPStore` listens on every interface, whatever host it is given, and admits anybody.
"""

import socket
from datetime import timedelta

import torch.distributed as dist


def serve(host: str) -> dist.TCPStore:
    """A store at `host` and a free port, shared by all stores of this process for that port. Raises OSError."""
    return serve_at(socket.create_server((host, 0)))


def serve_at(listener: socket.socket) -> dist.TCPStore:
    """A store that takes over a listening socket."""
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client of the store. Each thread that waits needs its own, since a waiting client blocks its other calls."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
