"""Sandbox for untrusted programs: separate processes, no network, and hard limits. It uses the layers the host has.

- Namespaces: the program gets its own network, process and IPC namespaces (`unshare` of util-linux). It has no network,
  and killing its first process ends all it has started. With its own /proc, unless a container forbids that, it cannot
  see the environments of other processes. Without namespaces the interpreter refuses sockets, which stops accidents
  rather than attacks, and child processes are searched for and killed.
- Landlock: the program can open only files of the interpreter, the system's libraries and its own folder.
- seccomp: the program can open no socket, no namespace and no anonymous memory file.
- A file system in memory: the kernel bounds it and ends it with the namespaces. Else a folder is watched, and removed.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from april.util.errors import refuse
from april.util.files import OPEN_FOLDER, remove_folder
from april.util.lifetime import reap
from april.workers.rewards.sandbox_runner import FIRST_UID, START, STARTS, UIDS

log = logging.getLogger(__name__)

# --- control groups ---------------------------------------------------------------------------------------------------

CGROUP_ROOT = Path("/sys/fs/cgroup")
LIMIT_FILES = {"memory.limit_in_bytes": "memory.oom_control", "memory.max": "memory.events"}
"""Files of control groups, versions 1 and 2: file of the memory limit -> file that counts out-of-memory kills."""


class ControlGroup:
    """The control group of one program, which limits the memory of all its processes together.

    If none can be created, it limits nothing, and `path` is empty.
    """

    def __init__(self, memory_mb: int):
        self.folder: Path | None = None
        parent, limit_file = find_parent_group()
        if parent is None:
            return
        with contextlib.suppress(OSError):
            folder = group_folder(parent)
            folder.mkdir()
            self.folder, self._kills = folder, folder / LIMIT_FILES[limit_file]
            (folder / limit_file).write_text(str(memory_mb << 20))

    @property
    def path(self) -> str:
        """Path of the group, which the program's first process enters; empty if there is no group."""
        return str(self.folder or "")

    @property
    def killed(self) -> bool:
        """Whether the kernel has killed a process of the group because of the memory limit."""
        if self.folder is None:
            return False
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in self._kills.read_text().splitlines())
            return counts.get("oom_kill", "0") != "0"
        return False

    def remove(self) -> None:
        """Remove the group; call it after all processes of the program have ended."""
        if self.folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def group_folder(parent: Path) -> Path:
    """A new control group's path, unique among threads and earlier processes with the same id."""
    return parent / f"april-{os.getpid()}-{os.urandom(4).hex()}"


@cache
def find_parent_group() -> tuple[Path | None, str]:
    """(parent folder where memory-limited groups can be created, name of the limit file); (None, "") if there is none.

    Also removes groups left behind by killed processes.
    """
    for parent in control_groups():
        for leftover in parent.glob("april-*-*"):
            if not Path("/proc", leftover.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    leftover.rmdir()
        attempt = group_folder(parent)
        try:
            attempt.mkdir()
        except OSError:
            continue
        found = next((limit_file for limit_file in LIMIT_FILES if (attempt / limit_file).exists()), "")
        attempt.rmdir()
        if found:
            return parent, found
    return None, ""


def control_groups() -> Iterator[Path]:
    """Folders of this process's control groups that may limit memory, each followed by its ancestors."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUP_ROOT / "memory" if controllers else CGROUP_ROOT
        group = root / own.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir())


# --- memory and disk usage --------------------------------------------------------------------------------------------

WATCH_S = 0.05
"""Shortest interval between two measurements of a program's memory and files (s)."""
BLOCK_BYTES, MIB = 512, 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UsageWatch:
    """Measures a program's time, the memory of the process tree below `pid`, and the size of its `folder`."""

    def __init__(self, pid: int, folder: str, group: ControlGroup, limits: "SandboxLimits"):
        self.pid, self.folder, self.group = pid, folder, group
        self.memory_bytes, self.files_bytes = limits.memory_mb * MIB, limits.files_mb * MIB
        self.entries = limits.entries
        self.deadline_s, self._due_s = time.monotonic() + limits.wall_s, 0.0

    def exceeded(self) -> str:
        """Name of the exceeded limit, "wall clock", "memory" or "output"; empty if there is none."""
        now_s = time.monotonic()
        if now_s >= self.deadline_s:
            return "wall clock"
        if now_s < self._due_s:
            return ""
        if self.group.killed:
            return "memory"
        pids = process_tree(self.pid)
        used = sum(map(resident_bytes, pids))
        if used > self.memory_bytes and sum(map(proportional_bytes, pids)) > self.memory_bytes:
            return "memory"
        entries, size_bytes = written(self.folder, pids, self.entries)
        if entries > self.entries or size_bytes > self.files_bytes:
            return "output"
        self._due_s = time.monotonic() + max(WATCH_S, 4 * (time.monotonic() - now_s))
        return ""


def process_tree(pid: int) -> list[int]:
    """Ids of a process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def proportional_bytes(pid: int) -> int:
    """Proportional set size, in which shared pages count once in total; private memory if the kernel hides it."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    with contextlib.suppress(OSError):
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * PAGE_BYTES
    return 0


def written(folder: str, pids: list[int], most: int) -> tuple[int, int]:
    """(entries in a folder, disk usage in bytes of its files and of deleted files that processes `pids` have open).

    Counting ends at `most` + 1 entries; a folder that cannot be read, as its path is too long, counts as that many.
    """
    files: dict[tuple[int, int], int] = {}
    entries, unread = 0, [folder]
    while unread and entries <= most:
        try:
            with os.scandir(unread.pop()) as found:
                for entry in islice(found, most + 1 - entries):
                    entries += 1
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            unread.append(entry.path)
                        else:
                            add_file(files, entry.stat(follow_symlinks=False))
        except OSError as error:
            entries = entries if error.errno in (errno.ENOENT, errno.ENOTDIR) else most + 1
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if not (status := os.stat(f"/proc/{pid}/fd/{name}")).st_nlink:
                        add_file(files, status)
    return entries, sum(files.values())


def add_file(files: dict[tuple[int, int], int], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        files[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES


# --- the sandbox ------------------------------------------------------------------------------------------------------

RUNNER = Path(__file__).with_name("sandbox_runner.py")
PYTHON = [sys.executable, "-I", "-S", "-B", "-c", START]
LIBC = ctypes.CDLL(None)
NAMESPACES = ["unshare", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
OWN_PROC = ["--mount-proc"]
AS_ROOT_OF_ITS_OWN = ["--user", "--map-root-user"]
KEEP_INIT = ["sh", "-c", '"$@"; exit $?', "sh"]
"""Command prefix: a shell as the namespace's first process; it stays root, starts the program, dies with `unshare`."""
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""Command prefix that ends the program with this process. A command instead of a `preexec_fn`, since Python code in a
forked child may deadlock on a lock that another thread held at the fork."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHELL_SIGNAL = 128
FILE_MARKS = (b"OSError: [Errno 27]", b"OSError: [Errno 28]")
MEMORY_MARKS = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc")
PROCESS_MARKS = (b"BlockingIOError: [Errno 11]", b"can't start new thread", b"OSError: [Errno 11]")
RUNNING, RUNNING_LOCK = set[int](), threading.Lock()
"""Ids of the first processes of the programs running now (a program and its judge run at once), and the set's lock."""
TAIL_BYTES = 4000
PREFIX = "april-program-"
REMOVAL_S = 1.0
"""Time limit for removing folders after a program (s). What is left then is removed after later programs."""
LEFT_S = 60.0
"""Age from which a program's folder that no process has locked counts as left over from a killed verifier (s)."""
NAMESPACE_END_S = 10.0
"""Longest wait for the end of all processes of a program (s)."""


class SandboxLimits(msgspec.Struct, frozen=True):
    """Limits of one run of a program. `wall_s`, `processes`, `memory_mb`, `files_mb` and `entries` hold for all its
    processes together, the others for each process."""

    wall_s: float = 4.0
    cpu_s: int = 5
    memory_mb: int = 1024
    file_mb: int = 16
    """Largest size of each file (MiB)."""
    files_mb: int = 64
    """Largest size of all files together (MiB)."""
    entries: int = 4096
    """Largest number of files and folders together."""
    open_files: int = 64
    processes: int = 32
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class SandboxResult:
    status: int
    """Exit status; 128 + signal number for a program ended by a signal."""
    output: bytes
    errors: bytes
    """The last TAIL_BYTES bytes that the program wrote to stderr."""
    exceeded: str
    """Exceeded limit: "wall clock", "processor time", "memory", "processes" or "output"; empty if there is none."""


def run(
    program: str, stdin: bytes, limits: SandboxLimits, descriptors: tuple[int, ...] = (), entry: str = ""
) -> SandboxResult:
    """Run a Python program until it ends or exceeds a limit; no process of it remains afterwards.

    `descriptors`: file descriptors passed on to it, under the same numbers; they are closed in this process.
    `entry`: source to run instead, which finds the program as `program.py` and may import it.
    """
    folder = tempfile.mkdtemp(prefix=PREFIX)
    lock = os.open(folder, OPEN_FOLDER)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        if entry:
            Path(folder, "entry.py").write_text(entry, encoding="utf-8")
        return run_in(folder, stdin, limits, descriptors)
    finally:
        deadline_s = time.monotonic() + REMOVAL_S
        remove_folder(folder, deadline_s)
        os.close(lock)
        remove_leftovers(deadline_s)


def remove_leftovers(deadline_s: float) -> None:
    """Until `deadline_s` (monotonic clock), remove folders that verifiers of this user have left behind."""
    owners = {os.geteuid(), *(() if os.geteuid() else range(FIRST_UID, FIRST_UID + UIDS))}
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + 8 * "?"):  # as `mkdtemp` names them
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid in owners and time.time() - status.st_ctime > LEFT_S:
                lock = os.open(folder, OPEN_FOLDER)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(str(folder), deadline_s)
                finally:
                    os.close(lock)


def run_in(folder: str, stdin: bytes, limits: SandboxLimits, descriptors: tuple[int, ...] = ()) -> SandboxResult:
    prefix = isolation()
    mounts = "own mounts" if OWN_PROC[0] in prefix else ""
    group = ControlGroup(limits.memory_mb + limits.files_mb * bool(mounts))  # files in memory count there, too
    rules = [msgspec.json.encode(limits).decode(), "" if prefix else "no sockets", group.path, mounts]
    runner = [*PYTHON, str(RUNNER), *rules]
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
    with RUNNING_LOCK:
        process = subprocess.Popen(
            [*DIE_WITH_PARENT, *prefix, *runner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=folder, env=env, start_new_session=True, preexec_fn=None if DIE_WITH_PARENT else die_with_parent,
            pass_fds=descriptors,
        )  # fmt: skip
        RUNNING.add(process.pid)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        watch = UsageWatch(process.pid, folder, group, limits)
        output, errors, exceeded = communicate(process, stdin, limits, watch)
    finally:
        end_all(process, everything=not prefix)
        exceeded_memory = group.killed
        group.remove()
    ended = -signal.SIGKILL if process.returncode is None else process.returncode
    status = ended if ended >= 0 else SHELL_SIGNAL - ended
    exceeded = "memory" if exceeded_memory else exceeded or limit_behind(status, errors)
    return SandboxResult(status, output, errors, exceeded)


def communicate(
    process: subprocess.Popen, stdin: bytes, limits: SandboxLimits, watch: UsageWatch
) -> tuple[bytes, bytes, str]:
    """Write `stdin` to the program and read its output until it closes its pipes or exceeds a limit.

    Returns (stdout, the end of stderr, exceeded limit).
    """
    output, errors, exceeded = bytearray(), bytearray(), ""
    to_program, from_program, complaints = process.stdin, process.stdout, process.stderr
    assert to_program and from_program and complaints
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
            remaining_s = watch.deadline_s - time.monotonic()
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
            exceeded = "output" if written > limits.output_bytes else watch.exceeded()
    while not exceeded and process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WATCH_S)
            break
        exceeded = watch.exceeded()
    return bytes(output).partition(STARTS.encode())[2], bytes(errors), exceeded


def feed(stdin: IO[bytes], unsent: memoryview) -> memoryview:
    """Write what the pipe takes; returns the rest, or nothing if the program has closed its stdin."""
    try:
        return unsent[os.write(stdin.fileno(), unsent[: 1 << 16]) :] if unsent else unsent
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return unsent[:0]


def limit_behind(status: int, errors: bytes) -> str:
    """The limit that ended a program, by its exit status or its last line to stderr (`errors`); empty if none."""
    last_words = errors.rstrip().rpartition(b"\n")[2] if status else b""
    if status == SHELL_SIGNAL + signal.SIGXCPU:
        return "processor time"
    if status == SHELL_SIGNAL + signal.SIGXFSZ or any(mark in last_words for mark in FILE_MARKS):
        return "output"
    if status == SHELL_SIGNAL + signal.SIGKILL or any(mark in last_words for mark in MEMORY_MARKS):
        return "memory"
    if any(mark in last_words for mark in PROCESS_MARKS):
        return "processes"
    return ""


def end_all(process: subprocess.Popen, everything: bool) -> None:
    """Kill all processes of a program, and wait for their end.

    The first process of a namespace ends only after all others in it, so killing that one is enough. `everything`:
    there is no namespace, so all children of this process are killed, except other running programs.
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
        reap(process)
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(OSError):
            stream.close()
    RUNNING.discard(process.pid)
    while everything:
        with RUNNING_LOCK:
            orphans = set(children(os.getpid())) - RUNNING
        everything = bool(orphans)
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
    done = subprocess.run([*PYTHON, str(RUNNER), "layers"], capture_output=True, text=True, timeout=60, check=True)
    prefix = isolation()
    namespaces = {"namespaces": bool(prefix), "a /proc of its own": "--mount-proc" in prefix}
    return namespaces | msgspec.json.decode(done.stdout.partition(STARTS)[2], type=dict[str, bool])


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
