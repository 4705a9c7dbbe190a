"""How a process of a run begins and ends: it gives way, and it does not outlive what started it."""

import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1

REFUSED = 2
"""exit status of a process that starting it again would not help: configuration, folder, or place is not to be used"""
RUN_FAILED = 3
"""exit status of a broker whose run cannot go on"""
STEPPED_ASIDE = 4
"""exit status of a broker that was told to leave while another has to go on from its journal"""
STEP_ASIDE = signal.SIGUSR1
"""tells a broker so: it stops nobody, and its peers wait for the next one"""

SUPERVISED = "APRIL_SUPERVISED_BY"
"""set in the environment of processes whose parent watches them, to the parent's process id"""


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, if `april run` stands behind it (Linux)."""
    parent = os.environ.get(SUPERVISED)
    if not parent or sys.platform != "linux":
        return
    end_with_parent()
    if os.getppid() != int(parent):
        sys.exit("april run has ended before this process could start")


LIBC = ctypes.CDLL(None)
"""loaded here, since a child that is forked beside threads may wait for ever where it loads something"""


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies (Linux)."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


NICENESS = 10
"""of what gives way: a tenth of the processor time of a process beside it that does not"""
SESSION_NICENESS = Path("/proc/self/autogroup")
"""of the whole session, where Linux shares processor time among sessions first; niceness then counts only within one"""


def give_way() -> None:
    """Let the other processes of this machine have the processor first.

    Generation on the CPU has always more to do, and is older when it is trained the longer it holds up the learner.
    Processes started from here give way, too, unless they begin a session of their own.
    """
    os.nice(max(0, NICENESS - os.nice(0)))
    pass_on_niceness()


def pass_on_niceness() -> None:
    """Give this process's session the niceness of the process, which has begun it."""
    for _ in range(20):
        try:
            SESSION_NICENESS.write_text(str(os.nice(0)))
        except BlockingIOError:  # the kernel takes ten changes a second from all users together
            time.sleep(0.1)
        except OSError:  # nothing is shared by sessions here
            return
        else:
            return


def end(status: int) -> NoReturn:
    """End a process that has done its work, without taking the interpreter down around native threads.

    Those of torch's process groups outlive their groups; one that asks for the interpreter while it is being
    taken down aborts the process, and one that is stuck in a transfer keeps it from ending.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
