"""Sandbox for untrusted programs: separate processes, no network, and hard limits. It uses the layers the host has.

- Namespaces: the program gets its own network, process and IPC namespaces (`unshare` of util-linux). It has no network,
  and killing its first process ends all it has started. With its own /proc, unless a container forbids that, it cannot
  see the environments of other processes. Without namespaces the interpreter refuses sockets, which stops accidents
  rather than attacks, and child processes are searched for and killed.
- Landlock: the program can open only files of the interpreter, the system's libraries and its own folder.
- seccomp: the program can open no socket, no namespace and no anonymous memory file.
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

from april.errors import refuse
from april.workers.rewards.control_group import ControlGroup, find_parent_group
from april.workers.rewards.usage import WATCH_S, UsageWatch

log = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("sandbox_runner.py")
LIBC = ctypes.CDLL(None)
NAMESPACES = ["unshare", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
OWN_PROC = ["--mount-proc"]
AS_ROOT_OF_ITS_OWN = ["--user", "--map-root-user"]
KEEP_INIT = ["sh", "-c", '"$@"; exit $?', "sh"]
"""Keeps the namespace's first process as root; it is the one that dies with `unshare`."""
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""Command prefix that ends the program with this process. A command instead of a `preexec_fn`, since Python code in a
forked child may deadlock on a lock that another thread held at the fork."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHELL_SIGNAL = 128
FILE_MARK = b"OSError: [Errno 27]"
MEMORY_MARKS = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc")
PROCESS_MARKS = (b"BlockingIOError: [Errno 11]", b"can't start new thread", b"OSError: [Errno 11]")
TAIL_BYTES = 4000
NAMESPACE_END_S = 10.0
"""Longest wait for the end of all processes of a program (s)."""


class SandboxLimits(msgspec.Struct, frozen=True):
    """Limits of one run of a program. `wall_s`, `processes`, `memory_mb` and `files_mb` hold for all its processes
    together, the others for each process."""

    wall_s: float = 4.0
    cpu_s: int = 5
    memory_mb: int = 1024
    file_mb: int = 16
    """Size of each file."""
    files_mb: int = 64
    """Size of all files together."""
    open_files: int = 64
    processes: int = 32
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class SandboxResult:
    status: int
    """Exit status; 128 + signal number for a program ended by a signal."""
    output: bytes
    errors: bytes
    """The last TAIL_BYTES of stderr."""
    exceeded: str
    """Exceeded limit: "wall clock", "processor time", "memory", "processes" or "output"; empty if there is none."""


def run(program: str, stdin: bytes, limits: SandboxLimits, descriptors: tuple[int, ...] = ()) -> SandboxResult:
    """Run a Python program until it ends or exceeds a limit; no process of it remains afterwards.

    `descriptors`: file descriptors passed on to it, under the same numbers; they are closed in this process.
    """
    folder = tempfile.mkdtemp(prefix="april-program-")
    try:
        Path(folder, "program.py").write_text(program, errors="replace")
        return run_in(folder, stdin, limits, descriptors)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_in(folder: str, stdin: bytes, limits: SandboxLimits, descriptors: tuple[int, ...] = ()) -> SandboxResult:
    prefix = isolation()
    group = ControlGroup(limits.memory_mb)
    rules = [msgspec.json.encode(limits).decode(), "" if prefix else "no sockets", group.path]
    runner = [sys.executable, "-I", "-B", str(RUNNER), *rules]
    process = subprocess.Popen(
        [*DIE_WITH_PARENT, *prefix, *runner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
        start_new_session=True,
        preexec_fn=None if DIE_WITH_PARENT else die_with_parent,
        pass_fds=descriptors,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        watch = UsageWatch(process.pid, folder, group, limits.memory_mb, limits.files_mb)
        output, errors, exceeded = communicate(process, stdin, limits, watch)
    finally:
        end_all(process, everything=not prefix)
        exceeded_memory = group.killed
        group.remove()
    status = process.returncode if process.returncode >= 0 else SHELL_SIGNAL - process.returncode
    exceeded = "memory" if exceeded_memory else exceeded or limit_behind(status, errors)
    return SandboxResult(status, output, errors, exceeded)


def communicate(
    process: subprocess.Popen, stdin: bytes, limits: SandboxLimits, watch: UsageWatch
) -> tuple[bytes, bytes, str]:
    """Write `stdin` to the program and read its output until it closes its pipes or exceeds a limit.

    Returns (stdout, the end of stderr, exceeded limit).
    """
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
            remaining_s = deadline_s - time.monotonic()
            for stream in [key.data for key, _ in selector.select(max(0.0, min(remaining_s, WATCH_S)))]:
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
            exceeded = "output" if written > limits.output_bytes else watch.exceeded() or timed_out(deadline_s)
    while not exceeded:
        try:
            process.wait(WATCH_S)
            break
        except subprocess.TimeoutExpired:
            exceeded = watch.exceeded() or timed_out(deadline_s)
    return bytes(output), bytes(errors), exceeded


def timed_out(deadline_s: float) -> str:
    return "wall clock" if time.monotonic() >= deadline_s else ""


def pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    """stdin, stdout and stderr of a process started with pipes for all three."""
    assert process.stdin and process.stdout and process.stderr
    return process.stdin, process.stdout, process.stderr


def feed(stdin: IO[bytes], unsent: memoryview) -> memoryview:
    """Write what the pipe takes; returns the rest, or nothing if the program has closed its stdin."""
    try:
        return unsent[os.write(stdin.fileno(), unsent[: 1 << 16]) :] if unsent else unsent
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return unsent[:0]


def limit_behind(status: int, errors: bytes) -> str:
    """The limit that ended a program, judged by the signal that killed it or the last line it wrote to stderr."""
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
    """Kill all processes of a program, and wait for their end.

    The first process of a namespace ends only after all others in it, so killing that one is enough. `everything`:
    there is no namespace; all children of this process are killed.
    """
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
    while everything and (orphans := children(os.getpid())):
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children(pid: int) -> list[int]:
    """Child processes of a single-threaded process.

    A verifier process has no children but programs under test, whose orphans are reparented to it.
    """
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def isolation() -> list[str]:
    """Command prefix that puts a program into its own namespaces; empty if the kernel permits none."""
    for more in (OWN_PROC, [], OWN_PROC + AS_ROOT_OF_ITS_OWN, AS_ROOT_OF_ITS_OWN):
        prefix = [*NAMESPACES, *more, *KEEP_INIT]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([*prefix, "true"], capture_output=True, timeout=10).returncode == 0:
                return prefix
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    return []


def isolation_layers() -> dict[str, bool]:
    """Isolation layers by name, and whether this host has each."""
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(RUNNER), "layers"], capture_output=True, text=True, timeout=60, check=True
    )
    prefix = isolation()
    namespaces = {"namespaces": bool(prefix), "a /proc of its own": "--mount-proc" in prefix}
    return namespaces | {name: bool(there) for name, there in msgspec.json.decode(done.stdout).items()}


def check_isolation(wanted: str) -> None:
    """Log the isolation layers of this host. Raises ConfigError if `wanted` is "strict" and one is missing."""
    found = isolation_layers()
    missing = [name for name, there in found.items() if not there]
    log.info("programs are isolated by %s", ", ".join(name for name, there in found.items() if there) or "nothing")
    if find_parent_group()[0] is None:
        log.info("no control group can be made here: the memory of a program's processes is looked at, not bounded")
    if missing and wanted == "strict":
        refuse(
            "reward.code_isolation",
            "strict",
            f"cannot be had here: programs would run without {', '.join(missing)}",
            "score on a host that permits it (docs/rewards.md), or set it to 'best'",
        )
