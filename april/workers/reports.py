"""What a holder of leases has to tell the broker, and keeps until that is on the broker's disk.

New tokens wait until the end of a pass, so that one message has those of all samples. The last tokens of a response
wait a moment for its score, so that mostly both are one message.

    reports = Reports(connection)
    reports.add_chunk(lease_id, start=0, tokens=ids, logprobs=logprobs, version=version)
    reports.close(wire.Scored(lease_id, [1.0], [{}]))
    reports.send()                      # at the end of a pass
    reports.acknowledge(lease_id, 8)    # as the broker answers
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from april import wire
from april.connections.broker import BrokerConnection
from april.data.support import Support
from april.processes import clock
from april.wire.limits import REPORT_BYTES, REPORT_CLOSINGS, REPORT_ROWS
from april.wire.rows import CHUNK, ROW, Row, chunk_row, observation_row, padded
from april.wire.version import Version

SCORE_WAIT_S = 0.05
"""longest wait of a response's last tokens for its score: until they are sent, their slot counts as taken"""
Entry = tuple[Row, bytes]
"""a row and its payload"""


@dataclass(slots=True)
class Kept:
    """Of one lease."""

    rows: list[Entry] = field(default_factory=list)
    """in order; those that no answer has covered"""
    unsent: int = 0
    """the last so many of them"""
    closing: wire.Closing | None = None
    closing_unsent: bool = False

    def take_rows(self) -> list[Entry]:
        """Those to be sent, which are sent now."""
        taken, self.unsent = self.rows[len(self.rows) - self.unsent :], 0
        return taken

    def take_closing(self) -> wire.Closing | None:
        """The end of the lease, if it is to be sent, which it is now."""
        taken = self.closing if self.closing_unsent else None
        self.closing_unsent = False
        return taken


class Reports:
    """Owned by the thread that owns the connection."""

    def __init__(self, connection: BrokerConnection):
        self.connection = connection
        self.unacknowledged_bytes = 0
        """of payloads that are kept"""
        self._kept: dict[int, Kept] = {}
        self._unsent: dict[int, None] = {}
        """leases that have something to be sent, in the order in which it came"""
        self._due = math.inf
        """when what waits has to go"""

    # --- what is new --------------------------------------------------------------------------------------------

    def add_chunk(
        self,
        lease_id: int,
        start: int,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: Version,
        finish_reason: str = "",
        support: Support | None = None,
        awaits_score: bool = False,
    ) -> None:
        """int32 [T] and float32 [T], sampled just now; `awaits_score`: its score is on the way."""
        parts = [tokens, logprobs, support.counts, support.ids] if support else [tokens, logprobs]
        payload = b"".join(map(np.ndarray.tobytes, parts))
        row = chunk_row(lease_id, start, len(tokens), version, finish_reason, payload, clock.now())
        self._add(row, payload, awaits_score)

    def add_observation(
        self,
        lease_id: int,
        start: int,
        tokens: np.ndarray,
        state: bytes,
        finish_reason: str = "",
        failed: bool = False,
        awaits_score: bool = False,
        parent: int = 0,
    ) -> None:
        """int32 [T]: what an environment has answered, and the state that it is in; or what an agent has said, in a
        branch that has left `parent`."""
        payload = tokens.tobytes() + state
        row = observation_row(lease_id, start, len(tokens), finish_reason, payload, failed, clock.now(), parent)
        self._add(row, payload, awaits_score)

    def _add(self, row: Row, payload: bytes, awaits_score: bool) -> None:
        kept = self._kept.setdefault(row.lease_id, Kept())
        kept.rows.append((row, payload))
        kept.unsent += 1
        self.unacknowledged_bytes += len(payload)
        self._wait(row.lease_id, SCORE_WAIT_S if awaits_score else 0.0)

    def close(self, closing: wire.Closing) -> None:
        """The lease ends, behind its tokens."""
        kept = self._kept.setdefault(closing.lease_id, Kept())
        kept.closing, kept.closing_unsent = closing, True
        self._wait(closing.lease_id, 0.0)

    def is_closing(self, lease_id: int) -> bool:
        """Whether its end has been reported, and is not on disk yet."""
        kept = self._kept.get(lease_id)
        return kept is not None and kept.closing is not None

    def _wait(self, lease_id: int, seconds: float) -> None:
        self._unsent[lease_id] = None
        self._due = min(self._due, clock.now() + seconds)

    # --- what the broker says -----------------------------------------------------------------------------------

    def acknowledge(self, lease_id: int, length: int) -> int:
        """All tokens below `length` are on disk; returns how many of them were sampled and are news."""
        kept, sampled = self._kept.get(lease_id), 0
        while kept and kept.rows and kept.rows[0][0].start < length:
            row, payload = kept.rows.pop(0)
            kept.unsent = min(kept.unsent, len(kept.rows))
            self.unacknowledged_bytes -= len(payload)
            sampled += row.tokens if row.kind == CHUNK else 0
        return sampled

    def forget(self, lease_id: int) -> None:
        """The lease is over."""
        if kept := self._kept.pop(lease_id, None):
            self.unacknowledged_bytes -= sum(len(payload) for _, payload in kept.rows)
        self._unsent.pop(lease_id, None)

    def send_again(self, lease_id: int, start: int = 0) -> None:
        """What is kept from `start` on, and the end of the lease behind it."""
        if kept := self._kept.get(lease_id):
            kept.unsent = sum(row.start >= start for row, _ in kept.rows)
            kept.closing_unsent = kept.closing is not None
            self._wait(lease_id, 0.0)

    def unanswered(self) -> list[int]:
        """Leases of which something was sent and not answered."""
        return [lease_id for lease_id, kept in self._kept.items() if kept.rows or kept.closing]

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, all_of_it: bool = False) -> None:
        """What is new, in as many reports as it needs, if something is due and the broker is there; or `all_of_it`."""
        if not self._unsent or not (all_of_it or (clock.now() >= self._due and not self.connection.is_silent)):
            return
        waiting = [self._kept[lease_id] for lease_id in self._unsent]
        self._unsent, self._due = {}, math.inf
        parts = list(split(entry for kept in waiting for entry in kept.take_rows()))
        closings = [closing for kept in waiting if (closing := kept.take_closing())]
        *full, last = parts or [[]]
        for part in full:
            self._report(part, [])
        self._report(last, closings[:REPORT_CLOSINGS])
        for first in range(REPORT_CLOSINGS, len(closings), REPORT_CLOSINGS):
            self._report([], closings[first : first + REPORT_CLOSINGS])

    def _report(self, entries: list[Entry], closings: list[wire.Closing]) -> None:
        arrays = []
        if entries:
            table = b"".join(ROW.pack(*row) for row, _ in entries)
            payload = b"".join(payload.ljust(padded(len(payload)), b"\0") for _, payload in entries)
            arrays = [np.frombuffer(table, np.uint8), np.frombuffer(payload, np.uint8)]
        self.connection.send(wire.Report(closings), arrays)


def split(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Between rows, so that each part fits into a report."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        own = ROW.size + padded(len(entry[1]))
        if part and (size + own > REPORT_BYTES or len(part) == REPORT_ROWS):
            yield part
            part, size = [], 0
        part.append(entry)
        size += own
    if part:
        yield part
