"""Runs a program that nobody has read: in processes of its own, without a network, within limits that kill.

Where the kernel permits it, the program gets network, process and IPC namespaces of its own (`unshare` of util-linux),
so that it reaches nobody and that killing one process ends all it has started, whatever sessions these have opened; and
a /proc of its own, where a container does not forbid that, so that it does not see the environments of others.
Elsewhere its interpreter refuses sockets, which stops accidents rather than intent, and what it has started is looked
for and killed.
Where the kernel has Landlock, it opens no file but the interpreter's, the system's libraries and its own folder's.
Where it filters system calls (seccomp), the program opens no socket, no namespace and no memory without a mapping.
"""

import contextlib
import ctypes
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import msgspec

from april.errors import ConfigError
from april.workers.rewards.control_group import ControlGroup, place
from april.workers.rewards.usage import WATCH_S, Watch

log = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("sandbox_runner.py")
LIBC = ctypes.CDLL(None)
NAMESPACES = ["unshare", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
OWN_PROC = ["--mount-proc"]
AS_ROOT_OF_ITS_OWN = ["--user", "--map-root-user"]
KEEP_INIT = ["sh", "-c", '"$@"; exit $?', "sh"]
"""the first process of the namespace stays root and is the one that dies with `unshare`"""
TIED = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""ends with this process. A command, since a child in which Python runs before it becomes the program may wait for ever
for a lock of a thread that it was forked beside"""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHELL_SIGNAL = 128
FILE_MARK = b"OSError: [Errno 27]"
MEMORY_MARKS = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc")
PROCESS_MARKS = (b"BlockingIOError: [Errno 11]", b"can't start new thread", b"OSError: [Errno 11]")
TAIL_BYTES = 4000
NAMESPACE_END_S = 10.0
"""longest end of all processes of a program"""


class Limits(msgspec.Struct, frozen=True):
    """Of one run of a program. All its processes share `wall_s`, `processes`, `memory_mb` and `files_mb`; the others
    are of each process."""

    wall_s: float = 4.0
    cpu_s: int = 5
    memory_mb: int = 1024
    file_mb: int = 16
    """of each file"""
    files_mb: int = 64
    """of all together"""
    open_files: int = 64
    processes: int = 32
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    status: int
    """exit status; of a program that a signal ended, 128 + its number"""
    output: bytes
    errors: bytes
    """the end of what it wrote to stderr"""
    exceeded: str
    """the limit that it ran into: wall clock | processor time | memory | processes | output, or nothing"""


def run(program: str, stdin: bytes, limits: Limits, descriptors: tuple[int, ...] = ()) -> Outcome:
    """Run a Python program to its end or to a limit. No process of it is left afterwards.

    `descriptors`: further ones that it gets, under their numbers; they are closed here.
    """
    folder = tempfile.mkdtemp(prefix="april-program-")
    try:
        Path(folder, "program.py").write_text(program, errors="replace")
        return run_in(folder, stdin, limits, descriptors)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_in(folder: str, stdin: bytes, limits: Limits, descriptors: tuple[int, ...] = ()) -> Outcome:
    prefix = isolation()
    group = ControlGroup(limits.memory_mb)
    rules = [msgspec.json.encode(limits).decode(), "" if prefix else "no sockets", group.path]
    runner = [sys.executable, "-I", "-B", str(RUNNER), *rules]
    process = subprocess.Popen(
        [*TIED, *prefix, *runner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
        start_new_session=True,
        preexec_fn=None if TIED else die_with_parent,
        pass_fds=descriptors,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        watch = Watch(process.pid, folder, group, limits.memory_mb, limits.files_mb)
        output, errors, exceeded = talk(process, stdin, limits, watch)
    finally:
        end_all(process, everything=not prefix)
        exceeded_memory = group.killed
        group.remove()
    status = process.returncode if process.returncode >= 0 else SHELL_SIGNAL - process.returncode
    exceeded = "memory" if exceeded_memory else exceeded or limit_behind(status, errors)
    return Outcome(status, output, errors, exceeded)


def talk(process: subprocess.Popen, stdin: bytes, limits: Limits, watch: Watch) -> tuple[bytes, bytes, str]:
    """Feed the program and collect what it writes, until it closes its pipes, or a limit is reached."""
    deadline_s = time.monotonic() + limits.wall_s
    output, errors, exceeded = bytearray(), bytearray(), ""
    to_program, from_program, complaints = pipes(process)
    reading, written, unsent = {from_program: output, complaints: errors}, 0, memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for pipe, events in (
            (to_program, selectors.EVENT_WRITE),
            (from_program, selectors.EVENT_READ),
            (complaints, selectors.EVENT_READ),
        ):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, events, pipe)
        while reading and not exceeded:
            left_s = deadline_s - time.monotonic()
            for stream in [key.data for key, _ in selector.select(max(0.0, min(left_s, WATCH_S)))]:
                if stream is to_program:
                    unsent = feed(stream, unsent)
                    done = not unsent
                else:
                    data = os.read(stream.fileno(), 1 << 16)
                    written, done = written + len(data), not data
                    reading[stream].extend(data)
                    del errors[:-TAIL_BYTES]
                if done:
                    selector.unregister(stream)
                    stream.close()
                    reading.pop(stream, None)
            exceeded = "output" if written > limits.output_bytes else watch.exceeded() or late(deadline_s)
    while not exceeded:
        try:
            process.wait(WATCH_S)
            break
        except subprocess.TimeoutExpired:
            exceeded = watch.exceeded() or late(deadline_s)
    return bytes(output), bytes(errors), exceeded


def late(deadline_s: float) -> str:
    return "wall clock" if time.monotonic() >= deadline_s else ""


def pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    """stdin, stdout and stderr of a process that was started with all three."""
    assert process.stdin and process.stdout and process.stderr
    return process.stdin, process.stdout, process.stderr


def feed(stdin: IO[bytes], unsent: memoryview) -> memoryview:
    """What could not be written yet; nothing when the program does not read."""
    try:
        return unsent[os.write(stdin.fileno(), unsent[: 1 << 16]) :] if unsent else unsent
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return unsent[:0]


def limit_behind(status: int, errors: bytes) -> str:
    """The limit that ended a program by itself, as far as its end tells: by whom it was killed, or its last words."""
    last_words = errors.rstrip().rpartition(b"\n")[2] if status else b""
    if status == SHELL_SIGNAL + signal.SIGXCPU:
        return "processor time"
    if status == SHELL_SIGNAL + signal.SIGXFSZ or FILE_MARK in last_words:
        return "output"
    if status == SHELL_SIGNAL + signal.SIGKILL or any(mark in last_words for mark in MEMORY_MARKS):
        return "memory"
    if any(mark in last_words for mark in PROCESS_MARKS):
        return "processes"
    return ""


def end_all(process: subprocess.Popen, everything: bool) -> None:
    """The end of a namespace's first process waits for that of all others in it, so that is the one to kill."""
    first = [] if everything else children(process.pid)
    for pid in first:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        process.wait(NAMESPACE_END_S if first else 0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in pipes(process):
        with contextlib.suppress(OSError):
            stream.close()
    while everything and (left := children(os.getpid())):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children(pid: int) -> list[int]:
    """Of a process with one thread. Those of this one are programs alone, whose orphans come to it."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def isolation() -> list[str]:
    """The command that puts a program into namespaces of its own; empty where the kernel permits none."""
    for more in (OWN_PROC, [], OWN_PROC + AS_ROOT_OF_ITS_OWN, AS_ROOT_OF_ITS_OWN):
        prefix = [*NAMESPACES, *more, *KEEP_INIT]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([*prefix, "true"], capture_output=True, timeout=10).returncode == 0:
                return prefix
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    return []


def bars() -> dict[str, bool]:
    """What keeps a program from the host, and whether this one permits it."""
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(RUNNER), "bars"], capture_output=True, text=True, timeout=60, check=True
    )
    prefix = isolation()
    namespaces = {"namespaces": bool(prefix), "a /proc of its own": "--mount-proc" in prefix}
    return namespaces | {name: bool(there) for name, there in msgspec.json.decode(done.stdout).items()}


def check_isolation(wanted: str) -> None:
    """Say what keeps programs from this host. Raises ConfigError where `strict` wants what is not there."""
    found = bars()
    missing = [name for name, there in found.items() if not there]
    log.info("programs are tried behind %s", ", ".join(name for name, there in found.items() if there) or "no bars")
    if place()[0] is None:
        log.info("no control group can be made here: the memory of a program's processes is looked at, not bounded")
    if missing and wanted == "strict":
        raise ConfigError(
            "key 'reward.code_isolation' = 'strict' cannot be had here: programs would run without "
            f"{', '.join(missing)}; score on a host that permits it (docs/rewards.md), or set it to 'best'"
        )
