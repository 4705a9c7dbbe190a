"""Runs a program that nobody has read: in processes of its own, without a network, within limits that kill.

Where the kernel permits it, the program gets network, process and IPC namespaces of its own (`unshare` of util-linux),
so that it reaches nobody and that killing one process ends all it has started, whatever sessions these have opened; and
a /proc of its own, where a container does not forbid that, so that it does not see the environments of others.
Elsewhere its interpreter refuses sockets, which stops accidents rather than intent, and what it has started is looked
for and killed.
Where the kernel has Landlock, it opens no file but the interpreter's, the system's libraries and its own folder's.
"""

import contextlib
import ctypes
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

RUNNER = Path(__file__).with_name("sandbox_runner.py")
NAMESPACES = ["unshare", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
OWN_PROC = ["--mount-proc"]
AS_ROOT_OF_ITS_OWN = ["--user", "--map-root-user"]
KEEP_INIT = ["sh", "-c", '"$@"; exit $?', "sh"]
"""the first process of the namespace stays root and is the one that dies with `unshare`"""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHELL_SIGNAL = 128
FILE_MARK = b"OSError: [Errno 27]"
MEMORY_MARKS = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc")
PROCESS_MARKS = (b"BlockingIOError: [Errno 11]", b"can't start new thread", b"OSError: [Errno 11]")
TAIL_BYTES = 4000
NAMESPACE_END_S = 10.0
"""longest end of all processes of a program"""


class Limits(msgspec.Struct, frozen=True):
    """Of one run of a program; its processes share `processes` and `wall_s`, the others are of each process."""

    wall_s: float = 4.0
    cpu_s: int = 5
    memory_mb: int = 1024
    file_mb: int = 16
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
    rules = [msgspec.json.encode(limits).decode(), "" if prefix else "no sockets"]
    runner = [sys.executable, "-I", "-B", str(RUNNER), *rules]
    process = subprocess.Popen(
        [*prefix, *runner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
        start_new_session=True,
        preexec_fn=die_with_parent,
        pass_fds=descriptors,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        output, errors, exceeded = talk(process, stdin, limits)
    finally:
        end_all(process, everything=not prefix)
    status = process.returncode if process.returncode >= 0 else SHELL_SIGNAL - process.returncode
    return Outcome(status, output, errors, exceeded or limit_behind(status, errors))


def talk(process: subprocess.Popen, stdin: bytes, limits: Limits) -> tuple[bytes, bytes, str]:
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
            for stream in [key.data for key, _ in selector.select(max(0.0, left_s))]:
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
            exceeded = "output" if written > limits.output_bytes else "wall clock" if left_s <= 0 else ""
    if not exceeded:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            exceeded = "wall clock"
    return bytes(output), bytes(errors), exceeded


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
    """The limit that ended a program by itself, as far as its end tells; the kernel kills for want of memory."""
    if status == SHELL_SIGNAL + signal.SIGXCPU:
        return "processor time"
    if status == SHELL_SIGNAL + signal.SIGXFSZ or (status and FILE_MARK in errors):
        return "output"
    if status == SHELL_SIGNAL + signal.SIGKILL or (status and any(mark in errors for mark in MEMORY_MARKS)):
        return "memory"
    if status and any(mark in errors for mark in PROCESS_MARKS):
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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def isolation() -> list[str]:
    """The command that puts a program into namespaces of its own; empty where the kernel permits none."""
    for more in (OWN_PROC, [], OWN_PROC + AS_ROOT_OF_ITS_OWN, AS_ROOT_OF_ITS_OWN):
        prefix = [*NAMESPACES, *more, *KEEP_INIT]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([*prefix, "true"], capture_output=True, timeout=10).returncode == 0:
                return prefix
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return []
