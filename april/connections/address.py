"""Where a peer finds its broker: at the address that it is given, or in the run's folder, where the broker writes its
own when it listens. So parts can be started beside their broker, and import what they need meanwhile."""

import time
from pathlib import Path

ADDRESS_FILE = "address"
"""in the run folder"""
POLL_S = 0.05


def address_at(connect: str, patience_s: float) -> str:
    """`connect`: tcp://HOST:PORT or the like, or a run folder. Raises TimeoutError where no broker has come by then."""
    if "://" in connect:
        return connect
    file = Path(connect) / ADDRESS_FILE
    deadline = time.monotonic() + patience_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no broker has written {file} within 'broker.patience_s' = {patience_s:g} s; start it")
        time.sleep(POLL_S)
    return file.read_text()
