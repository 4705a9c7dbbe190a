"""What every process of a run has in common: it logs to stderr, and it does not outlive what started it."""

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1

SUPERVISED = "APRIL_SUPERVISED"
"""set in the environment of processes whose parent watches them"""


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, if `april run` stands behind it (Linux)."""
    if os.environ.get(SUPERVISED) and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
