"""What every process of a run has in common: it logs to stderr, and it does not outlive what started it."""

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1

SUPERVISED = "APRIL_SUPERVISED_BY"
"""set in the environment of processes whose parent watches them, to the parent's process id"""


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, if `april run` stands behind it (Linux)."""
    parent = os.environ.get(SUPERVISED)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("april run has ended before this process could start")


def log_to_stderr(who: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {who} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


def leave_at_once(status: int) -> NoReturn:
    """End the process although a thread is stuck in a call that cannot be interrupted."""
    logging.getLogger(__name__).warning("a transfer of weights is stuck; the process ends without waiting for it")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
