"""A control group that limits the total memory of a program's processes, on hosts that permit creating one.

Supports cgroup version 1 (its memory hierarchy) and version 2. The group is removed when the program has ended.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMIT_FILES = {"memory.limit_in_bytes": "memory.oom_control", "memory.max": "memory.events"}
"""Files of cgroup versions 1 and 2: memory limit -> counter of out-of-memory kills."""


class ControlGroup:
    """The control group of one program. If none can be created, it limits nothing, and `path` is empty."""

    def __init__(self, memory_mb: int):
        self.folder: Path | None = None
        parent, limit_file = find_parent_group()
        if parent is None:
            return
        with contextlib.suppress(OSError):
            folder = own_folder(parent)
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


def own_folder(parent: Path) -> Path:
    """A unique group folder: differs between threads, and from that of an earlier process with the same id."""
    return parent / f"april-{os.getpid()}-{os.urandom(4).hex()}"


@cache
def find_parent_group() -> tuple[Path | None, str]:
    """(parent folder where memory-limited groups can be created, name of the limit file); (None, "") if there is none.

    Also removes groups left behind by killed processes.
    """
    for parent in parents():
        for leftover in parent.glob("april-*-*"):
            if not Path("/proc", leftover.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    leftover.rmdir()
        attempt = own_folder(parent)
        try:
            attempt.mkdir()
        except OSError:
            continue
        found = next((limit_file for limit_file in LIMIT_FILES if (attempt / limit_file).exists()), "")
        attempt.rmdir()
        if found:
            return parent, found
    return None, ""


def parents() -> Iterator[Path]:
    """The control groups of this process, and their ancestors."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = ROOT / "memory" if controllers else ROOT
        group = root / own.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir())
