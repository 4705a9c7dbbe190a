"""A broker that dies under the trainer of somebody else."""

import os
import signal
from pathlib import Path


def kill_broker(run):
    """Of a run that was started with its connection; it is started again."""
    children = Path(f"/proc/{run._broker.local.process.pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    [broker] = [pid for pid in pids if b"broker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(broker, signal.SIGKILL)
