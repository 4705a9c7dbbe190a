"""Report rows: new tokens of many samples as one table, sent and journaled in the same format.

A table is bytes: fixed-width rows, one after the other. A second array holds the rows' payloads in the same order, each
aligned to 4 bytes. The payload of a chunk is its token ids (int32), their behaviour log-probabilities (float32) and, in
a run that truncates the sampling distribution (top-k, top-p, min-p), the number of ids in each support and those ids
(int32). The payload of an observation is its token ids and the state of its environment.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from april.wire.message import Version

Buffer = bytes | bytearray | memoryview
CHUNK, OBSERVATION = 0, 1
"""Kinds of rows: tokens sampled by the policy, and tokens from an environment or agent."""
MAX_FIELD = (1 << 32) - 1
"""Largest value of a 32-bit field of a row. A larger value is stored as this one, which also makes the row invalid."""
FINISH_REASONS = ("", "stop", "length")
"""Finish reasons, indexed by `ReportRow.finish`; "" while the response goes on."""
ROW = struct.Struct("<QdIIIIIIBBBBI")
"""Layout of a row: the fields of `ReportRow` in order, little-endian, 48 bytes. The broker's two loops over all rows
unpack it themselves, which takes half the time of making a `ReportRow`."""
SIZE_FIELD, ENDS_LEASE_BYTE = 6, 43
"""Index of the field `size` in a row, and offset of the byte `ends_lease` in an encoded row."""
TABLE = np.dtype(
    [("lease_id", "<u8"), ("time", "<f8")]
    + [(name, "<u4") for name in ("start", "tokens", "incarnation", "step", "size", "checksum")]
    + [(name, "u1") for name in ("kind", "finish", "failed", "ends_lease")]
    + [("parent", "<u4")]
)
"""Layout of a row (`ROW`) as a numpy dtype, for reading a table by columns."""


class ReportRow(NamedTuple):
    """One row of a report: consecutive tokens of one sample."""

    lease_id: int
    time: float
    """When the tokens were sampled, Unix time in seconds."""
    start: int
    """Offset of the row's first token in the response."""
    tokens: int
    """Number of tokens in the row."""
    incarnation: int
    step: int
    """Policy step of the weights that sampled the tokens; with `incarnation` their version. Both are 0 for an
    observation."""
    size: int
    """Length of the row's payload, bytes."""
    checksum: int
    """Crc32 of the payload, computed by the sender."""
    kind: int
    """Kind of the row: `CHUNK` or `OBSERVATION`."""
    finish: int
    """Finish reason of the response or turn, as an index in `FINISH_REASONS`."""
    failed: int
    """1 for an observation that replaces the answer of an environment which has failed."""
    ends_lease: int
    """1 if the lease ends with this row. The broker sets it; a sender leaves 0."""
    parent: int = 0
    """For an observation that starts a fork of an agent session: number of the fork that the new one starts from."""

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS[self.finish]

    @property
    def end(self) -> int:
        return self.start + self.tokens


def chunk_row(
    lease_id: int, start: int, count: int, version: Version, finish_reason: str, payload: Buffer, time: float = 0.0
) -> ReportRow:
    finish = FINISH_REASONS.index(finish_reason)
    incarnation, step = version
    if max(incarnation, step, start) > MAX_FIELD:
        incarnation, step, start = min(incarnation, MAX_FIELD), min(step, MAX_FIELD), min(start, MAX_FIELD)
    return ReportRow(lease_id, time, start, count, incarnation, step, len(payload), crc32(payload), CHUNK, finish, 0, 0)


def observation_row(
    lease_id: int,
    start: int,
    count: int,
    finish_reason: str,
    payload: Buffer,
    failed: bool = False,
    time: float = 0.0,
    parent: int = 0,
) -> ReportRow:
    finish, start, size = FINISH_REASONS.index(finish_reason), min(start, MAX_FIELD), len(payload)
    return ReportRow(lease_id, time, start, count, 0, 0, size, crc32(payload), OBSERVATION, finish, failed, 0, parent)


def pack_rows(rows: Iterable[ReportRow]) -> bytes:
    return b"".join(ROW.pack(*row) for row in rows)


def read_rows(table: Buffer) -> Iterator[ReportRow]:
    return map(ReportRow._make, ROW.iter_unpack(table))


def padded(size: int) -> int:
    """Length of a payload of `size` bytes with padding to a multiple of 4, bytes."""
    return (size + 3) & ~3


def padded_sizes(table: np.ndarray) -> np.ndarray:
    """Length of each row's payload with padding to a multiple of 4 (bytes), int64 [rows]. `table`: array of dtype
    `TABLE`."""
    return (table["size"].astype(np.int64) + 3) & ~3


def select_rows(table: Buffer, payload: Buffer, selected: Sequence[bool]) -> tuple[bytearray, bytes]:
    """The rows of a table for which `selected` is true, and their padded payloads, in order: (table, payload)."""
    rows, payloads, view, offset = bytearray(), [], memoryview(payload), 0
    for index, is_selected in enumerate(selected):
        row = table[index * ROW.size : (index + 1) * ROW.size]
        end = offset + padded(ROW.unpack(row)[SIZE_FIELD])
        if is_selected:
            rows += row
            payloads.append(view[offset:end])
        offset = end
    return rows, b"".join(payloads)
