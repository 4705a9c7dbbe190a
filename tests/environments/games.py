"""Environments of the tests, named as `tests.environments.games:NAME`."""

import os
import time
import zlib
from pathlib import Path

from april.environments import Observation, Turn

TURNS = 5


def chain(turn: Turn) -> Observation:
    """Every observation depends on all turns before it, so that a state or a turn that got lost shows."""
    said = [*(turn.state["said"] if turn.state else []), f"{turn.number}:{turn.text}:{turn.complete}"]
    digest = zlib.crc32("|".join([turn.prompt, turn.label, *said]).encode())
    done = turn.number + 1 == TURNS
    return Observation(f"{digest % 1000:03d}", {"said": said, "reward": digest / 2**32}, done)


def count(turn: Turn) -> Observation:
    """Says how often it was asked in this response, which only the state knows."""
    times = turn.state or 0
    assert times == turn.number
    return Observation(str(times % 10), times + 1)


def wait_at_the_gate(turn: Turn) -> Observation:
    """The same, once a file is there; until then whoever asks has to wait, but for the call before a run starts."""
    if turn.text == f"{turn.label},":
        return count(turn)
    folder = Path(os.environ["GATE"])
    (folder / f"asked-{os.getpid()}").touch()
    while not (folder / "open").exists():
        time.sleep(0.05)
    return count(turn)


def hang(turn: Turn) -> str:
    time.sleep(1000)


def crash(turn: Turn) -> str:
    os._exit(7)


kept: list[bytes] = []


def fill(turn: Turn) -> str:
    """Keeps what it allocates, and says so as long as there is room."""
    kept.append(bytes(1 << 28))
    return f"{len(kept)}"


def fail(turn: Turn) -> str:
    raise RuntimeError("no such tool")


def silent(turn: Turn) -> str:
    return ""


def over(turn: Turn) -> Observation:
    return Observation("", done=True)


def wrong(turn: Turn):
    return 5


def hoard(turn: Turn) -> Observation:
    return Observation("1", state=b"x" * 100_000)


def endless(turn: Turn) -> str:
    return "1" * 1000
