"""Start and end of a run's processes: exit statuses, end with the parent, CPU priority, delays before restarts, and the
kill of a process with all its descendants."""

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

REFUSED = 2
"""Exit status of a process that would fail again: its configuration, folder or address cannot be used."""
RUN_FAILED = 3
"""Exit status of a broker whose run has failed."""
STEPPED_ASIDE = 4
"""Exit status of a broker that has stepped aside for a successor, which continues from its journal."""
STEP_ASIDE = signal.SIGUSR1
"""Signal that makes a broker step aside: it stops no peer, and its peers wait for the successor."""


def exit_at_once(status: int) -> NoReturn:
    """Exit with `status` without shutting down the interpreter while native threads run.

    Threads of torch's process groups outlive the groups. One that needs the interpreter during shutdown aborts the
    process; one that is blocked in a transfer keeps it from exiting.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class PartThread(threading.Thread):
    """A daemon thread without which its process would hang: an exception in it is logged and ends the process with
    status 1, so that the supervisor restarts the process."""

    def __init__(self, name: str, target: Callable[..., object], *arguments: object):
        super().__init__(name=name, target=target, args=arguments, daemon=True)

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            log.critical("thread %s has failed, and ends its process", self.name, exc_info=True)
            exit_at_once(1)


def in_background(work: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
    """Run `work(*arguments)` in a daemon thread; the future has its result or exception."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"background-{work.__name__}", daemon=True).start()
    return future


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


_interrupts: list[int] = []


def remember_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt and be remembered: libraries with a bare `except` swallow the exception."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Whether Ctrl-C has been pressed since `remember_interrupts`."""
    return bool(_interrupts)


def stop_signals() -> list[signal.Signals]:
    """Signals that stop a run in order; SIGHUP only if it is not ignored, as it is under nohup."""
    outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if outlives_terminal else [signal.SIGHUP])


# --- the terminal -----------------------------------------------------------------------------------------------------


class EnduringStream:
    """A text stream to a terminal or pipe whose reader may be gone; what is written then is discarded.

    With `april run … | tee log`, Ctrl-C ends tee first; the run still has to write its checkpoint.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):  # a full disk, for example
            raise error
        leave_terminal()


def endure_lost_readers() -> None:
    """Let this process continue when the reader of its stdout or stderr is gone."""
    sys.stdout, sys.stderr = EnduringStream(sys.stdout), EnduringStream(sys.stderr)


def leave_terminal() -> None:
    """Redirect stdout and stderr to /dev/null: the terminal is gone, and writing to it would fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


# --- end with the parent ----------------------------------------------------------------------------------------------


SUPERVISED = "APRIL_SUPERVISED_BY"
"""Environment variable with the process id of the parent that supervises this process."""

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
"""The C library, loaded at import: a child forked while other threads run may deadlock when it loads a library."""


def die_with_parent() -> None:
    """If `april run` supervises this process, have the kernel kill it when its parent dies (Linux)."""
    parent = os.environ.get(SUPERVISED)
    if not parent or sys.platform != "linux":
        return
    end_with_parent()
    if os.getppid() != int(parent):
        sys.exit("april run has ended before this process could start")


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# --- CPU priority -----------------------------------------------------------------------------------------------------


NICENESS = 10
"""Niceness of low-priority processes: about a tenth of the CPU time of a normal process."""
SESSION_NICENESS = Path("/proc/self/autogroup")
"""File with the niceness of the whole session. With autogrouping, Linux divides CPU time among sessions first, and a
process's own niceness counts only within its session."""


def give_way() -> None:
    """Lower this process's CPU priority below that of the machine's other processes.

    Generation on the CPU uses all the time it gets; if it slowed the learner, its samples would only be staler. Child
    processes inherit the priority, unless they start a session of their own.
    """
    os.nice(max(0, NICENESS - os.nice(0)))
    pass_on_niceness()


def pass_on_niceness() -> None:
    """Set the niceness of this process's session (which it leads) to that of the process."""
    for _ in range(20):
        try:
            SESSION_NICENESS.write_text(str(os.nice(0)))
        except BlockingIOError:  # the kernel accepts ten changes per second in total
            time.sleep(0.1)
        except OSError:  # no autogrouping on this system
            return
        else:
            return


# --- kill with all descendants ----------------------------------------------------------------------------------------


MARK = "APRIL_EXECUTION"
"""Environment variable with a mark that all descendants inherit, whatever their process group (Linux)."""
SEARCHES = 5
"""Number of searches for marked processes, since a found one may have started another meanwhile."""


def new_mark() -> dict[str, str]:
    """A new mark, as the environment entry (name, value) for a process that will be killed with all its descendants."""
    return {MARK: secrets.token_hex(16)}


def end_marked(mark: dict[str, str]) -> None:
    """SIGKILL all processes with the mark. Processes that replaced their environment are not found."""
    entry = f"{MARK}={mark[MARK]}".encode()
    for _ in range(SEARCHES):
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if entry in environment_of(folder)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def environment_of(folder: Path) -> list[bytes]:
    """Environment entries (NAME=VALUE) of the process with this folder in /proc; [] if it has ended or is another
    user's."""
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


# --- delays before restarts -------------------------------------------------------------------------------------------


LONGEST_RESTART_DELAY_S = 60.0
"""Longest delay before a restart, and the delay before the last allowed one (s)."""
STEADY_S = 120.0
"""Time (s) of work since a process's start after which its count of restarts is reset to 0."""
RESTART_DELAY_DOUBLINGS = 10
"""Number of doublings after which the delay before a restart grows no further."""


def restart_delay_s(restart: int, most: int) -> float:
    """Seconds to wait before restart number `restart` (from 1), if `most` restarts without success are allowed.

    Delays double from one second on, but are at least those obtained by halving backwards from the last delay of 60 s:
    with 3 restarts they are 0, 30 and 60 s.
    """
    if restart <= 1:
        return 0.0
    growing = 2.0 ** min(restart - 1, RESTART_DELAY_DOUBLINGS) - 1
    return min(LONGEST_RESTART_DELAY_S, max(growing, LONGEST_RESTART_DELAY_S * 2.0 ** (restart - most)))


# --- killed processes -------------------------------------------------------------------------------------------------

KILLED_S = 10.0
"""Longest time to wait for a killed process (seconds)."""


def reap(process: subprocess.Popen[Any]) -> int | None:
    """Wait up to `KILLED_S` for a killed process; returns its exit status. None for a process that the kernel cannot
    end, as while a device or network disk does not answer; it is left behind."""
    try:
        return process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        log.warning("process %d was killed and has not ended within %g s; it is left", process.pid, KILLED_S)
        return None
