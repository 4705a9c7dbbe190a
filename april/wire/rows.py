"""What became of samples, as the rows of one table: new tokens of many of them travel and are kept together.

A table is bytes, one fixed-width row behind the other. The payloads of its rows lie in their order beside it, each
begun at a multiple of four bytes. A chunk's payload is its ids (int32), their behaviour log-probabilities (float32)
and, where the distribution is cut, the numbers of ids in the supports and those ids (int32). That of an observation is
its ids and the state that its environment is left in.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from april.wire.version import Version

Buffer = bytes | bytearray | memoryview
CHUNK, OBSERVATION = 0, 1
"""kinds of rows"""
LARGEST = (1 << 32) - 1
"""of what a row can say; whatever is larger is as far from where a response can be"""
ENDINGS = ("", "stop", "length")
"""what the numbers in `finish` stand for: "" while a response goes on, or else how it ended"""
ROW = struct.Struct("<QdIIIIIIBBBBI")
"""the fields of `Row`, little-endian: 48 bytes"""
SIZE, FINISH, OVER = 6, 9, 43
"""places of `size` and `finish` in a row, and the byte that holds `over`"""
TABLE = np.dtype(
    [("lease_id", "<u8"), ("time", "<f8")]
    + [(name, "<u4") for name in ("start", "tokens", "branch", "step", "size", "checksum")]
    + [(name, "u1") for name in ("kind", "finish", "failed", "over")]
    + [("parent", "<u4")]
)
"""the same for numpy, which sees the columns of a table so"""


class Row(NamedTuple):
    lease_id: int
    time: float
    """when its tokens were sampled, Unix seconds"""
    start: int
    tokens: int
    """how many, the first of which is the `start`-th of the response"""
    branch: int
    step: int
    """of the version they were sampled under"""
    size: int
    """bytes of its payload"""
    checksum: int
    """crc32 of its payload, by whoever made it"""
    kind: int
    finish: int
    """place in `ENDINGS`"""
    failed: int
    """1 where an observation says that the environment has not answered"""
    over: int
    """1 where it ends its lease, as the broker adds"""
    parent: int = 0
    """of an observation that begins a branch of an agent's session: the number of the branch that it leaves"""

    @property
    def version(self) -> Version:
        return Version(self.branch, self.step)

    @property
    def finish_reason(self) -> str:
        return ENDINGS[self.finish]

    @property
    def end(self) -> int:
        return self.start + self.tokens


def chunk_row(
    lease_id: int, start: int, count: int, version: Version, finish_reason: str, payload: Buffer, time: float = 0.0
) -> Row:
    finish = ENDINGS.index(finish_reason)
    branch, step = version
    if max(branch, step, start) > LARGEST:
        branch, step, start = min(branch, LARGEST), min(step, LARGEST), min(start, LARGEST)
    return Row(lease_id, time, start, count, branch, step, len(payload), crc32(payload), CHUNK, finish, 0, 0)


def observation_row(
    lease_id: int,
    start: int,
    count: int,
    finish_reason: str,
    payload: Buffer,
    failed: bool = False,
    time: float = 0.0,
    parent: int = 0,
) -> Row:
    finish, start, size, checksum = ENDINGS.index(finish_reason), min(start, LARGEST), len(payload), crc32(payload)
    return Row(lease_id, time, start, count, 0, 0, size, checksum, OBSERVATION, finish, failed, 0, parent)


def pack_rows(rows: Iterable[Row]) -> bytes:
    return b"".join(ROW.pack(*row) for row in rows)


def read_rows(table: Buffer) -> Iterator[Row]:
    return map(Row._make, ROW.iter_unpack(table))


def padded(size: int) -> int:
    """Bytes from the beginning of a payload to that of the next one."""
    return (size + 3) & ~3


def padded_sizes(table: np.ndarray) -> np.ndarray:
    """The same for each row of a table of `TABLE`, int64."""
    return (table["size"].astype(np.int64) + 3) & ~3


def select_rows(table: Buffer, payload: Buffer, taken: Sequence[bool]) -> tuple[bytearray, bytes]:
    """The rows of a table that are `taken`, and their payloads."""
    rows, payloads, view, offset = bytearray(), [], memoryview(payload), 0
    for place, take in enumerate(taken):
        row = table[place * ROW.size : (place + 1) * ROW.size]
        end = offset + padded(ROW.unpack(row)[SIZE])
        if take:
            rows += row
            payloads.append(view[offset:end])
        offset = end
    return rows, b"".join(payloads)
