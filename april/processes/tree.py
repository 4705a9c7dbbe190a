"""Ends a process with all its descendants in any session or group, found by an inherited variable (Linux)."""

import contextlib
import os
import secrets
import signal
from pathlib import Path

MARK = "APRIL_EXECUTION"
"""Environment variable that descendants inherit."""
ROUNDS = 5
"""Searches, since a found process may have started another one meanwhile."""


def new_mark() -> dict[str, str]:
    """Environment entry with a new mark, for a process that will be ended with its descendants."""
    return {MARK: secrets.token_hex(16)}


def end_marked(mark: dict[str, str]) -> None:
    """SIGKILL all processes with the mark. Processes that replaced their environment are not found."""
    entry = f"{MARK}={mark[MARK]}".encode()
    for _ in range(ROUNDS):
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if entry in environment_of(folder)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def environment_of(folder: Path) -> list[bytes]:
    """The environment of a process by its folder in /proc; empty if it has ended or is another user's."""
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
