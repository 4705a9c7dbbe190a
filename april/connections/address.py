"""Finds a broker's address: the one given, or the one that the broker writes into the run folder once it listens.

So parts can be started at the same time as their broker and do their imports meanwhile.
"""

import time
from pathlib import Path

ADDRESS_FILE = "address"
"""File of the run folder."""
POLL_S = 0.05


def address_at(connect: str, patience_s: float) -> str:
    """The broker's address. `connect`: an address such as tcp://HOST:PORT, or a run folder. Raises TimeoutError if no
    broker has written its address within `patience_s`."""
    if "://" in connect:
        return connect
    file = Path(connect) / ADDRESS_FILE
    deadline = time.monotonic() + patience_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no broker has written {file} within 'broker.patience_s' = {patience_s:g} s; start it")
        time.sleep(POLL_S)
    return file.read_text()
