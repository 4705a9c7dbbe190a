"""Bytes/s of weights from a learner to an engine in another process on the same card.

April's lanes go from the host's memory into the engine's, through shared memory or over gloo, or from the card's
into the card's by CUDA IPC. Beside them: the copies from the card to the host and back; what CUDA IPC does without a
lane, by which a process copies straight out of another one's memory; and a copy within one process, the limit of that.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess


def main() -> None:
    with other_process("take_copies") as copies, other_process("take_weights") as engine:
        importlib.import_module("lane_sides").measure(__doc__.partition("\n")[0], copies, engine)


@contextmanager
def other_process(side: str) -> Iterator[tuple[Connection, BaseProcess]]:
    """A function of `lane_sides` in a process of its own, which imports torch while this one does."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=run, args=(side, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours, child
    finally:
        child.terminate()
        child.join()


def run(side: str, connection: Connection) -> None:
    getattr(importlib.import_module("lane_sides"), side)(connection)


if __name__ == "__main__":
    main()
