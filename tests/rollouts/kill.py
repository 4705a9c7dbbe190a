"""A broker that dies under the trainer of somebody else."""

import os
import signal
from pathlib import Path

from tests.run.processes import wait_until


def kill_broker(run):
    """Of a run that was started with its connection; it is started again."""
    found = []
    wait_until(lambda: found.extend(brokers_of(run._broker.local.process.pid)) or found)
    [broker] = found
    os.kill(broker, signal.SIGKILL)


def brokers_of(pid):
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in content(file).split()]
    return [pid for pid in pids if b"april.cli\0broker" in content(Path(f"/proc/{pid}/cmdline"))]


def content(file):
    """Nothing of a process or a thread that has ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
