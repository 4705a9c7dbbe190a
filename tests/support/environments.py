"""Environments for tests, named `tests.support.environments:NAME`."""

import os
import time
import zlib
from pathlib import Path

from april.workers.environments import EnvironmentTurn, Observation

TURNS = 5


def chain(turn: EnvironmentTurn) -> Observation:
    """Environment whose observations depend on all turns before, so that a lost state or turn shows."""
    said = [*(turn.state["said"] if turn.state else []), f"{turn.number}:{turn.text}:{turn.complete}"]
    digest = zlib.crc32("|".join([turn.prompt, turn.label, *said]).encode())
    done = turn.number + 1 == TURNS
    return Observation(f"{digest % 1000:03d}", {"said": said, "reward": digest / 2**32}, done)


def count(turn: EnvironmentTurn) -> Observation:
    """Environment that answers with its number of calls in this response (last digit), which it keeps only in the
    state."""
    times = turn.state or 0
    assert times == turn.number
    return Observation(str(times % 10), times + 1)


def wait_at_the_gate(turn: EnvironmentTurn) -> Observation:
    """Environment like `count` that blocks until the file `open` exists, except in the trial call before a run
    starts."""
    if turn.text == f"{turn.label},":
        return count(turn)
    folder = Path(os.environ["GATE"])
    (folder / f"asked-{os.getpid()}").touch()
    while not (folder / "open").exists():
        time.sleep(0.05)
    return count(turn)


def hang(turn: EnvironmentTurn) -> str:
    time.sleep(1000)


def crash(turn: EnvironmentTurn) -> str:
    os._exit(7)


kept: list[bytes] = []


def fill(turn: EnvironmentTurn) -> str:
    """Environment that allocates and keeps 256 MiB per call; answers with the number of blocks."""
    kept.append(bytes(1 << 28))
    return f"{len(kept)}"


def fail(turn: EnvironmentTurn) -> str:
    raise RuntimeError("no such tool")


def silent(turn: EnvironmentTurn) -> str:
    return ""


def over(turn: EnvironmentTurn) -> Observation:
    return Observation("", done=True)


def wrong(turn: EnvironmentTurn):
    return 5


def hoard(turn: EnvironmentTurn) -> Observation:
    return Observation("1", state=b"x" * 100_000)


def endless(turn: EnvironmentTurn) -> str:
    return "1" * 1000
