"""Reports of a lease holder to the broker, kept for resending until the broker has journaled them.

Rows of all samples are batched into one message at the end of a pass. The last rows of a response wait up to
SCORE_WAIT_S for its score, so that both usually travel in one message.

    reports = Reports(connection)
    reports.add_chunk(lease_id, start=0, tokens=ids, logprobs=logprobs, version=version)
    reports.close(wire.Scored(lease_id, [1.0], [{}]))
    reports.send()                      # at the end of a pass
    reports.acknowledge(lease_id, 8)    # as the broker answers
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from msgspec.structs import replace

from april import wire
from april.data.support import Support
from april.util import clock
from april.wire.limits import MAX_FEEDBACK_CHARACTERS, MAX_REPORT_BYTES, MAX_REPORT_CLOSINGS, MAX_REPORT_ROWS
from april.wire.message import Version
from april.wire.rows import CHUNK, ROW, ReportRow, chunk_row, observation_row, padded
from april.wire.sockets.broker import BrokerConnection

SCORE_WAIT_S = 0.05
"""Longest time for which the last report rows (token chunks) of a response wait for its score, seconds. Until they
arrive, the broker counts the slot as taken."""
Entry = tuple[ReportRow, bytes]
"""A row of a report, and its payload: the bytes of its tokens, log-probabilities and further arrays."""


@dataclass(slots=True)
class PendingReport:
    """What a report still has to tell of one lease: rows and a closing message that the broker has not acknowledged."""

    rows: list[Entry] = field(default_factory=list)
    """Unacknowledged rows in order, sent or not."""
    unsent: int = 0
    """Number of rows at the end of `rows` that are still to be sent."""
    closing: wire.Closing | None = None
    values: bytes = b""
    """float32 bytes: the numbers that a verifier or teacher gave to each token or turn; `closing` names them."""
    closing_unsent: bool = False

    def take_rows(self) -> list[Entry]:
        """Return the unsent rows, and mark them as sent."""
        taken, self.unsent = self.rows[len(self.rows) - self.unsent :], 0
        return taken

    def take_closing(self) -> tuple[wire.Closing, bytes] | None:
        """Mark the closing message as sent; returns it with the bytes of its token scores, or None if there is none
        that is unsent."""
        taken = (self.closing, self.values) if self.closing and self.closing_unsent else None
        self.closing_unsent = False
        return taken


class Reports:
    """Outgoing rows and closing messages of all leases. Must be used from the thread that owns the connection."""

    def __init__(self, connection: BrokerConnection):
        self.connection = connection
        self.unacknowledged_bytes = 0
        """Payload bytes of all unacknowledged rows."""
        self._pending: dict[int, PendingReport] = {}
        self._unsent: dict[int, None] = {}
        """Ids of the leases with rows or closing messages that have not been sent, in order of arrival (a dict used as
        an ordered set)."""
        self._due_at = math.inf
        """Unix time (s) by which the unsent rows and closing messages have to be sent; infinite if there are none."""

    # --- adding --------------------------------------------------------------------------------------------

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
        """Add sampled tokens, int32 [T], with their log-probabilities, float32 [T], as a row of the next report.

        `start`: number of response tokens before these. `finish_reason`: "" unless they end the response.
        `support`: candidate ids that each token was drawn from; None: the whole vocabulary. `awaits_score`: the score
        will follow soon, so hold the row back for it.
        """
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
        """Add tokens that the policy did not sample, int32 [T], as a row of the next report.

        They are either an environment's observation, with its `state` after it, or tokens of an agent program's
        request, with the request as `state`. `start`: number of tokens before these in the response, or in a session's
        fork. `parent`: number of the fork from which that fork branches off. `awaits_score`: the score will follow
        soon, so hold the row back for it. `failed`: the environment did not answer, and the tokens tell the policy so.
        """
        payload = tokens.tobytes() + state
        row = observation_row(lease_id, start, len(tokens), finish_reason, payload, failed, clock.now(), parent)
        self._add(row, payload, awaits_score)

    def _add(self, row: ReportRow, payload: bytes, awaits_score: bool) -> None:
        pending = self._pending.setdefault(row.lease_id, PendingReport())
        pending.rows.append((row, payload))
        pending.unsent += 1
        self.unacknowledged_bytes += len(payload)
        self._schedule(row.lease_id, SCORE_WAIT_S if awaits_score else 0.0)

    def close(self, closing: wire.Closing, values: bytes = b"") -> None:
        """Report the end of a lease, after its rows. `values`: the numbers for each token or turn that `closing` names,
        as float32 bytes."""
        pending = self._pending.setdefault(closing.lease_id, PendingReport())
        pending.closing, pending.values, pending.closing_unsent = closing, values, True
        self._schedule(closing.lease_id, 0.0)

    def is_closing(self, lease_id: int) -> bool:
        """Whether the end of the lease has been reported and is not journaled yet."""
        pending = self._pending.get(lease_id)
        return pending is not None and pending.closing is not None

    def _schedule(self, lease_id: int, seconds: float) -> None:
        self._unsent[lease_id] = None
        self._due_at = min(self._due_at, clock.now() + seconds)

    # --- answers of the broker -----------------------------------------------------------------------------------

    def acknowledge(self, lease_id: int, length: int) -> int:
        """Drop the rows that start before `length`, the number of response tokens that the broker has journaled.
        Returns the number of sampled tokens in the dropped rows."""
        pending, sampled = self._pending.get(lease_id), 0
        while pending and pending.rows and pending.rows[0][0].start < length:
            row, payload = pending.rows.pop(0)
            pending.unsent = min(pending.unsent, len(pending.rows))
            self.unacknowledged_bytes -= len(payload)
            sampled += row.tokens if row.kind == CHUNK else 0
        return sampled

    def forget(self, lease_id: int) -> None:
        """Drop everything of a lease that has ended."""
        if pending := self._pending.pop(lease_id, None):
            self.unacknowledged_bytes -= sum(len(payload) for _, payload in pending.rows)
        self._unsent.pop(lease_id, None)

    def send_again(self, lease_id: int, start: int = 0) -> None:
        """Schedule resending of a lease's kept rows that begin at `start` response tokens or later, and of its closing
        message."""
        if pending := self._pending.get(lease_id):
            pending.unsent = sum(row.start >= start for row, _ in pending.rows)
            pending.closing_unsent = pending.closing is not None
            self._schedule(lease_id, 0.0)

    def unanswered(self) -> list[int]:
        """Ids of the leases with rows or a closing message that the broker has not acknowledged."""
        return [lease_id for lease_id, pending in self._pending.items() if pending.rows or pending.closing]

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, force: bool = False) -> None:
        """Send unsent rows and closing messages in as many reports as they need, if the time for them has come
        (`_due_at`) and the broker is not silent.

        `force`: send now in any case.
        """
        if not self._unsent or not (force or (clock.now() >= self._due_at and not self.connection.is_silent)):
            return
        waiting = [self._pending[lease_id] for lease_id in self._unsent]
        self._unsent, self._due_at = {}, math.inf
        parts = list(split(entry for pending in waiting for entry in pending.take_rows()))
        taken = [closing for pending in waiting if (closing := pending.take_closing())]
        closings = [closing for closing, _ in taken if not isinstance(closing, wire.TokenScored)]
        *full, last = parts or [[]]
        for part in full:
            self._report(part, [])
        if last or closings:
            self._report(last, closings[:MAX_REPORT_CLOSINGS])
        for first in range(MAX_REPORT_CLOSINGS, len(closings), MAX_REPORT_CLOSINGS):
            self._report([], closings[first : first + MAX_REPORT_CLOSINGS])
        self._report_token_scores([(each, values) for each, values in taken if isinstance(each, wire.TokenScored)])

    def _report_token_scores(self, scored: list[tuple[wire.TokenScored, bytes]]) -> None:
        """Send closing messages that have numbers for each token or turn (token scores) in as many reports as they
        need. One that is too large for a report is split."""
        while scored:
            ends = list(accumulate(len(values) for _, values in scored[:MAX_REPORT_CLOSINGS]))
            text_ends = list(accumulate(sum(map(len, closing.feedback)) for closing, _ in scored[: len(ends)]))
            fitting = bisect_right(ends, MAX_REPORT_BYTES), bisect_right(text_ends, MAX_FEEDBACK_CHARACTERS)
            count = max(1, min(fitting))
            closings, values = [closing for closing, _ in scored[:count]], b"".join(each for _, each in scored[:count])
            for first in range(0, max(1, len(values)), MAX_REPORT_BYTES):
                part: list[wire.Closing] = [replace(each, start=first // 4) if first else each for each in closings]
                array = np.frombuffer(values[first : first + MAX_REPORT_BYTES], np.float32)
                self.connection.send(wire.Report(part), [array])
            scored = scored[count:]

    def _report(self, entries: list[Entry], closings: list[wire.Closing]) -> None:
        arrays = []
        if entries:
            table = b"".join(ROW.pack(*row) for row, _ in entries)
            payload = b"".join(payload.ljust(padded(len(payload)), b"\0") for _, payload in entries)
            arrays = [np.frombuffer(table, np.uint8), np.frombuffer(payload, np.uint8)]
        self.connection.send(wire.Report(closings), arrays)


def split(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Split entries into parts that fit into one report each."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        own = ROW.size + padded(len(entry[1]))
        if part and (size + own > MAX_REPORT_BYTES or len(part) == MAX_REPORT_ROWS):
            yield part
            part, size = [], 0
        part.append(entry)
        size += own
    if part:
        yield part
