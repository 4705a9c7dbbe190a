"""A bound by the kernel on the memory of all processes of a program together, where control groups may be made.

Version 1 has a hierarchy for memory, version 2 one for everything; what is made in either is removed with the program.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
BOUND = {"memory.limit_in_bytes": "memory.oom_control", "memory.max": "memory.events"}
"""file of the bound, by version 1 and 2: file that counts kills"""


class ControlGroup:
    """Of one program. Where none can be made it bounds nothing, and says so."""

    def __init__(self, memory_mb: int):
        self.folder: Path | None = None
        parent, bound = place()
        if parent is None:
            return
        with contextlib.suppress(OSError):
            folder = own_folder(parent)
            folder.mkdir()
            self.folder, self._kills = folder, folder / BOUND[bound]
            (folder / bound).write_text(str(memory_mb << 20))

    @property
    def path(self) -> str:
        """For the process that is to become the program, which enters it; empty where there is none."""
        return str(self.folder or "")

    @property
    def killed(self) -> bool:
        """The kernel has killed a process for want of memory."""
        if self.folder is None:
            return False
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in self._kills.read_text().splitlines())
            return counts.get("oom_kill", "0") != "0"
        return False

    def remove(self) -> None:
        """When all processes of the program have ended."""
        if self.folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def own_folder(parent: Path) -> Path:
    """One that no other thread makes, nor a predecessor of the same process id has left."""
    return parent / f"april-{os.getpid()}-{os.urandom(4).hex()}"


@cache
def place() -> tuple[Path | None, str]:
    """Where groups with a bound on memory can be made, and the file of that bound. What processes that were killed have
    left there is removed."""
    for parent in parents():
        for left in parent.glob("april-*-*"):
            if not Path("/proc", left.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
        attempt = own_folder(parent)
        try:
            attempt.mkdir()
        except OSError:
            continue
        found = next((bound for bound in BOUND if (attempt / bound).exists()), "")
        attempt.rmdir()
        if found:
            return parent, found
    return None, ""


def parents() -> Iterator[Path]:
    """The groups that this process is in, and those above them."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = ROOT / "memory" if controllers else ROOT
        group = root / own.lstrip("/")
        yield from (one for one in (group, *group.parents) if one.is_relative_to(root) and one.is_dir())
