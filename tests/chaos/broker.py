"""The broker as the chaos tests start it: the real one, with every promise it makes written down before it leaves, on a
machine whose clock is set to another time before every start and at every look.

    python -m tests.chaos.broker CONFIG

Into `chaos/` of the run folder it writes a stream of promises, how much of each journal file a sync has reached, and
what it is doing at the moment. With SYNC_OFF in the environment a sync does nothing, and the disk catches up by itself
now and then: the negative control.
"""

import errno
import importlib
import os
import random
import sys
import time
import zlib
from collections import Counter

from april import wire
from april.broker import server, service
from april.broker.journal import files, journal
from april.broker.views import status
from april.cli import main
from april.config import load
from april.util import clock
from tests.chaos import failing_calls
from tests.chaos.peer import jumping_clock
from tests.chaos.run_state import SYNC_OFF, RunState

WRITE_BACK_S = 10.0
"""Seconds between syncs that nobody asked for, when SYNC_OFF is set."""
LINGER_S = 0.005
"""Delay of rare phases, so that a kill can hit them."""


class WatchedServer(server.Server):
    def serve_once(self) -> None:
        super().serve_once()
        tokens, recorder = self.service.ledger.account.tokens, self.service.recorder
        unsynced = recorder.accepted - Counter(recorder.acknowledged)
        unsynced_tokens = sum(count for (what, _), count in unsynced.items() if what == "tokens")
        state.set_phase(phase(self.service), tokens["generated"] + tokens["evaluation"] - unsynced_tokens)

    def _send_one(self, message) -> bool:
        for promise in promises(message):
            state.promise(promise)
        if isinstance(message.message, wire.Batch):
            state.set_phase("delivery")
            time.sleep(10 * LINGER_S)
        return super()._send_one(message)


class WatchedService(service.Service):
    def _dispatch(self, route, received, *rest) -> None:
        if isinstance(received.message, wire.Consumed | wire.Durable):
            report = type(received.message).__name__.lower()
            reports[received.session, received.sequence] = [report, received.message.step]
        super()._dispatch(route, received, *rest)


class KeepingJournal(journal.Journal):
    def release_files(self, starts) -> None:
        for start in starts:
            state.keep(files.file_path(self.folder, start))
        super().release_files(starts)


reports: dict[tuple[int, int], list] = {}
"""Reports of the learner that are not accepted yet, by (session, sequence)."""


def promises(outgoing) -> list[list]:
    """Promises that a message makes to its peer."""
    message = outgoing.message
    if isinstance(message, wire.Answers):
        done = [["done", lease_id] for lease_id in message.done]
        return [["chunk", lease_id, length] for lease_id, length in message.acks] + done
    if isinstance(message, wire.Batch):
        frames = wire.encode(message, outgoing.arrays)
        return [["batch", message.step, message.first, zlib.crc32(b"".join(map(bytes, frames[1:])))]]
    report = reports.pop((outgoing.session, outgoing.sequence), None)
    return [report] if report and isinstance(message, wire.Accepted) else []


def phase(live: service.Service) -> str:
    learner = live.peers.learner()
    if learner is None or not learner.started or live.ledger.steps.consumed < live.ledger.steps.frontier:
        return "catching up"
    if live.ledger.leases.generating and not live.ledger.rounds.open:
        return "abort"
    return {"waiting for weights": "weights"}.get(status.phase(live), status.phase(live))


def watched_sync(descriptor: int) -> None:
    """Sync and record how far it reached; a kill may come before and after it."""
    global written_back_at
    size = os.fstat(descriptor).st_size
    if os.environ.get(SYNC_OFF):
        if time.monotonic() - written_back_at < WRITE_BACK_S:
            return
        written_back_at = time.monotonic()
    elif random.random() < 0.1:
        time.sleep(LINGER_S)
    real_sync(descriptor)
    state.synced(os.readlink(f"/proc/self/fd/{descriptor}"), size)


def watched_write(descriptor: int, buffers: list, offset: int) -> int:
    """A full disk takes a part of what it is given, and then refuses."""
    if not state.disk_is_full:
        return real_write(descriptor, buffers, offset)
    os.pwrite(descriptor, bytes(buffers[0])[: len(buffers[0]) // 2], offset)
    raise no_room()


def watched_probe(folder) -> None:
    if state.disk_is_full:
        raise no_room()
    real_probe(folder)


def no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    jumping_clock()
    importlib.reload(clock)
    state = RunState(load(sys.argv[1]).run_dir)
    state.set_phase("starting")
    written_back_at = 0.0
    real_sync, os.fdatasync = os.fdatasync, watched_sync
    real_write, os.pwritev = os.pwritev, watched_write
    real_probe, server.probe_disk = server.probe_disk, watched_probe
    server.Server, server.Service, server.Journal = WatchedServer, WatchedService, KeepingJournal
    failing_calls.install("broker")
    sys.exit(main(["broker", *sys.argv[1:]]))
