"""How long the loop of a broker with a hundred thousand samples in flight is held by the end of a journal file, where a
snapshot becomes due and space is given back.

The broker's own ledger, journal and snapshots without the sockets between them: all samples take turns at growing by a
chunk, and after every sync the broker is asked whether a file is full, as its loop does.
"""

import time
from pathlib import Path

from april.broker.service import Service
from april.config import Config, load
from april.processes import clock

from .april_side import write_run
from .load import PROCESSES, BenchmarkError
from .restart import grow, open_service, schedule

RESPONSE_TOKENS = 1 << 20
LAST_SNAPSHOT_S = 120.0


def measure(folder: Path, samples: int, chunks: int) -> float:
    """The longest of such calls while every sample grows to so many chunks, in milliseconds."""
    path = write_run(folder, schedule(samples), RESPONSE_TOKENS)
    mine, theirs = PROCESSES.Pipe()
    broker = PROCESSES.Process(target=_grow_and_tell, args=(theirs, load(path), samples * chunks))
    broker.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        raise BenchmarkError("the process that takes the snapshots has failed; its error is above") from None
    finally:
        broker.join()


def _grow_and_tell(pipe, config: Config, rows: int) -> None:
    service = open_service(config)
    longest_s, rows_each = 0.0, grow(service)
    while rows > 0:
        rows -= next(rows_each)
        longest_s = max(longest_s, held_s(service))
    deadline = time.monotonic() + LAST_SNAPSHOT_S
    while max(service.snapshots.store.positions(), default=0) < service.journal.file_begins:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{LAST_SNAPSHOT_S:g} s after the last file was closed there is no snapshot of it")
        longest_s = max(longest_s, held_s(service))
        time.sleep(0.01)
    pipe.send(1000 * longest_s)


def held_s(service: Service) -> float:
    began = time.perf_counter()
    service.end_file()
    service.snapshots.follow(service.journal.file_begins, service.journal.let_go, clock.now())
    return time.perf_counter() - began
