"""Long tests take turns: a suite takes a part of them, which changes with the code, so that suites of several commits
come to all of them. `pytest --every` takes all."""

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALWAYS = ("always", "sglang", "vllm", "megatron")
"""Marks of tests that all run: those that choose a part themselves, and those that share a server or an environment,
which is most of their time."""


@cache
def state_of_the_code() -> bytes:
    content = (path.read_bytes() for path in sorted((ROOT / "april").rglob("*.py")))
    return hashlib.sha256(b"".join(content)).digest()


def has_its_turn(name: str, parts: int, state: bytes | None = None) -> bool:
    """Whether the one of `parts` parts that has its turn with a state of the code, by default this one, has a name."""
    state = state_of_the_code() if state is None else state
    return hashlib.sha256(state + name.encode()).digest()[0] % parts == 0
