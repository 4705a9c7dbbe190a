"""Long tests take turns: a suite takes a part of them, which changes with the code, so that suites of several commits
come to all of them. `pytest --every` takes all."""

import hashlib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = 4
"""A suite takes one of so many parts of the long tests."""


@cache
def state_of_the_code() -> bytes:
    content = (path.read_bytes() for path in sorted((ROOT / "april").rglob("*.py")))
    return hashlib.sha256(b"".join(content)).digest()


def has_its_turn(name: str, parts: int, state: bytes | None = None) -> bool:
    """Whether the one of `parts` parts that has its turn with a state of the code, by default this one, has a name."""
    state = state_of_the_code() if state is None else state
    return hashlib.sha256(state + name.encode()).digest()[0] % parts == 0


def waits_for_its_turn(item: pytest.Item) -> bool:
    """Whether a suite of this state of the code leaves a test out: it is long, and another part has its turn."""
    takes_turns = item.get_closest_marker("full") and not item.get_closest_marker("always")
    return bool(takes_turns) and not has_its_turn(name_of_turn(item), PARTS)


def name_of_turn(item: pytest.Item) -> str:
    """A test's own name, or the one of the tests of its file with which it shares its time."""
    mark, name = item.get_closest_marker("turn"), item.nodeid.partition("@")[0]
    return f"{name.partition('::')[0]}::{mark.args[0]}" if mark else name
