"""What a program under test and all that it has started use together: memory, and room on the disk."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from april.workers.rewards.control_group import ControlGroup

WATCH_S = 0.05
"""how often is looked, at most"""
BLOCK_BYTES, MIB = 512, 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks at the tree of processes below `pid`, at their control group, and at the folder that they may write."""

    def __init__(self, pid: int, folder: str, group: ControlGroup, memory_mb: int, files_mb: int):
        self.pid, self.folder, self.group = pid, folder, group
        self.memory_bytes, self.files_bytes = memory_mb * MIB, files_mb * MIB
        self._due_s = 0.0

    def exceeded(self) -> str:
        """memory | output, or nothing."""
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
    """A process and all below it."""
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
    """What several share counts once in all, where the kernel shows it; otherwise what is nobody else's by nature."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    with contextlib.suppress(OSError):
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * PAGE_BYTES
    return 0


def written_bytes(folder: str, pids: list[int]) -> int:
    """Of the files in the folder, and of those that are removed and still open."""
    files: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                note(files, os.lstat(os.path.join(parent, name)))
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{name}")
                    if not found.st_nlink:
                        note(files, found)
    return sum(files.values())


def note(files: dict[tuple[int, int], int], found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        files[found.st_dev, found.st_ino] = found.st_blocks * BLOCK_BYTES
