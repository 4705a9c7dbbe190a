"""How long a killed broker takes to come back on a long journal: from its start to its first answer.

The journal is made by the broker's own ledger, journal and snapshots without the sockets between them: as many
samples as are open take turns at growing by a chunk until it is full, and the process dies just before the next
snapshot would have been due. Of the snapshots it makes the last, which is the one that is read. The journal's pages are
dropped from the system's cache before each start.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from april import wire
from april.broker.journal.files import SUFFIX
from april.broker.journal.journal import Journal
from april.broker.prompts import PromptBook
from april.broker.service import Service
from april.broker.snapshots import POLL_S
from april.config import Config, load
from april.util import clock
from april.wire.message import Version
from april.wire.rows import chunk_row, pack_rows
from april.wire.sockets.broker import BrokerConnection

from .april_side import Broker, write_run
from .load import BenchmarkError, in_own_process

GROUP_SIZE = 8
CHUNK_TOKENS, TABLE_ROWS = 60, 256
"""Tokens of a chunk, and rows of a report."""
RESPONSE_TOKENS = 1 << 20
SYNC_BYTES = 4 << 20
START_S = 300.0


def schedule(samples: int) -> str:
    """TOML of one round that opens all the samples at once."""
    groups = samples // GROUP_SIZE
    return f"""
[schedule]
kind = "april"
rollout_batch_size = {groups // 4}
over_sampling_batch_size = {groups}
n_samples_per_prompt = {GROUP_SIZE}
max_staleness = 7
"""


def make_journal(folder: Path, size_bytes: int, samples: int) -> tuple[Path, int]:
    """Returns the configuration and the number of tokens that are on disk."""
    path = write_run(folder, schedule(samples), RESPONSE_TOKENS)
    return path, in_own_process(_write_and_die, load(path), size_bytes)


def _write_and_die(tell, config: Config, size_bytes: int) -> None:
    service, written = open_service(config), 0
    for rows in grow(service):
        written = rows if service.journal.file_full else written + rows
        service.end_file()
        if service.journal.end < size_bytes or not is_nearly_full(service.journal, written + rows):
            continue
        while max(service.snapshots.store.positions(), default=0) < service.journal.file_start:
            service.snapshots.follow(service.journal.file_start, service.journal.release_files, clock.now())
            time.sleep(POLL_S)
        tell(service.ledger.account.tokens["open"])
        os.kill(os.getpid(), signal.SIGKILL)


def open_service(config: Config) -> Service:
    """The service of a new run with every sample leased that its schedule opens."""
    config.run_dir.mkdir(parents=True)
    journal = Journal(
        config.run_dir / "journal", config.broker.journal_file_mb << 20, config.broker.journal_file_records
    )
    service = Service(config, PromptBook(config), journal, clock.now())
    ledger = service.ledger
    service.tick(clock.now())
    while sample := service.schedule.next_sample(ledger, 0):
        ledger.lease(sample, f"worker-{sample.index}", 0, clock.now() + 60)
    return service


def grow(service: Service) -> Iterator[int]:
    """All samples in a worker's hands by a chunk, again and again; after each sync, how many rows it has covered."""
    payload = os.urandom(8 * CHUNK_TOKENS)
    length, rows, leases = 0, 0, list(service.ledger.leases)
    while True:
        for first in range(0, len(leases), TABLE_ROWS):
            table = [
                chunk_row(lease_id, length, CHUNK_TOKENS, Version(0, 0), "", payload)
                for lease_id in leases[first : first + TABLE_ROWS]
            ]
            service.ledger.add_chunks(pack_rows(table), len(table) * payload)
            rows += len(table)
            if service.journal.unsynced_bytes >= SYNC_BYTES:
                service.journal.sync()
                yield rows
                rows = 0
        length += CHUNK_TOKENS


def is_nearly_full(journal: Journal, rows: int) -> bool:
    """Whether one more sync makes a snapshot due; its file has so many rows then."""
    begins = max(int(segment.stem) for segment in journal.folder.glob(f"*{SUFFIX}"))
    return journal.end + SYNC_BYTES >= begins + journal.file_bytes or rows >= journal.file_records


def restart_s(config_path: Path, tokens: int) -> float:
    """From the start of the process until it has said how it stands; it is killed afterwards."""
    config = load(config_path)
    drop_from_cache(config.run_dir / "journal")
    (config.run_dir / "address").unlink(missing_ok=True)
    started = time.monotonic()
    broker = Broker(config_path)
    try:
        connection = BrokerConnection(broker.address(START_S), "monitor", "restart", "restart", START_S)
        connection.hello([])
        status = orjson.loads(connection.request(wire.StatusRequest(), START_S).arrays[0].tobytes())
        took_s = time.monotonic() - started
        connection.close()
    finally:
        broker.kill()
    if status["tokens"]["open"] != tokens:
        raise BenchmarkError(f"{tokens} tokens were synced, the broker came back with {status['tokens']}")
    return took_s


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
