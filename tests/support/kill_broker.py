"""Kill the broker of a local run."""

import os
import signal
from pathlib import Path

from tests.support.run_processes import wait_until


def kill_broker(run):
    """Kill the broker of a run that `connect` has started; its supervisor restarts it."""
    found = []
    wait_until(lambda: found.extend(brokers_of(run._broker.local.process.pid)) or found)
    [broker] = found
    os.kill(broker, signal.SIGKILL)


def brokers_of(pid):
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in content(file).split()]
    return [pid for pid in pids if b"april.cli\0broker" in content(Path(f"/proc/{pid}/cmdline"))]


def content(file):
    """Content of a /proc file; b"" if the process or thread has ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
