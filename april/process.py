"""What every process of a run has in common: it logs to stderr, and it does not outlive what started it."""

import ctypes
import logging
import os
import signal
import sys

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
