"""Memory and disk usage of a program under test and all processes it has started."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from april.workers.rewards.control_group import ControlGroup

WATCH_S = 0.05
"""Shortest interval between two measurements (s)."""
BLOCK_BYTES, MIB = 512, 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UsageWatch:
    """Measures the process tree below `pid`, its control group, and the folder it may write to."""

    def __init__(self, pid: int, folder: str, group: ControlGroup, memory_mb: int, files_mb: int):
        self.pid, self.folder, self.group = pid, folder, group
        self.memory_bytes, self.files_bytes = memory_mb * MIB, files_mb * MIB
        self._due_s = 0.0

    def exceeded(self) -> str:
        """Name of the exceeded limit, "memory" or "output"; empty if there is none."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return ""
        if self.group.killed:
            return "memory"
        pids = list(tree(self.pid))
        used = sum(map(resident_bytes, pids))
        if used > self.memory_bytes and sum(map(proportional_bytes, pids)) > self.memory_bytes:
            return "memory"
        if written_bytes(self.folder, pids) > self.files_bytes:
            return "output"
        self._due_s = time.monotonic() + max(WATCH_S, 4 * (time.monotonic() - now_s))
        return ""


def tree(pid: int) -> Iterator[int]:
    """Ids of a process and all its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


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


def written_bytes(folder: str, pids: list[int]) -> int:
    """Disk usage of the files in the folder, and of deleted files that are still open."""
    files: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                add_file(files, os.lstat(os.path.join(parent, name)))
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if not status.st_nlink:
                        add_file(files, status)
    return sum(files.values())


def add_file(files: dict[tuple[int, int], int], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        files[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES
