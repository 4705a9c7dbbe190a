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

REFUSED = 2
"""exit status of a part that cannot work as it is configured; starting it again would not help"""


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


def end(status: int) -> NoReturn:
    """End a process that has done its work, without taking the interpreter down around native threads.

    Those of torch's process groups outlive their groups; one that asks for the interpreter while it is being
    taken down aborts the process, and one that is stuck in a transfer keeps it from ending.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
