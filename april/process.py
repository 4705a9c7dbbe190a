"""What every process of a run has in common: it logs to stderr, and it does not outlive what started it."""

import ctypes
import logging
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import orjson

PR_SET_PDEATHSIG = 1

REFUSED = 2
"""exit status of a process that starting it again would not help: configuration, folder, or place is not to be used"""
RUN_FAILED = 3
"""exit status of a broker whose run cannot go on"""

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


IDS = ("run", "worker", "role", "group", "sample", "step")
"""what a log line may say it is about, in a field of its own: log.info(..., extra={"worker": name})"""


class ToStderr(logging.StreamHandler):
    """Writes each line to what sys.stderr is at that time."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, the ids that are known, and the exception."""

    def __init__(self, process: str, ids: dict[str, Any]):
        """`ids`: of every line of this process."""
        super().__init__()
        self.process = process
        self.ids = ids

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= self.ids | {name: getattr(record, name) for name in IDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(process: str, log_format: str = "text", **ids: Any) -> None:
    """Set logging up for a process of a run. `log_format`: text | json, where each line has these `ids` and the
    exception that ends the process is a line, too."""
    handler = ToStderr()
    if log_format == "json":
        handler.setFormatter(JsonLines(process, ids))
        sys.excepthook = log_exception
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_exception(kind, error, traceback) -> None:
    logging.getLogger(__name__).critical("ended by %s", kind.__name__, exc_info=(kind, error, traceback))


def end(status: int) -> NoReturn:
    """End a process that has done its work, without taking the interpreter down around native threads.

    Those of torch's process groups outlive their groups; one that asks for the interpreter while it is being
    taken down aborts the process, and one that is stuck in a transfer keeps it from ending.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
