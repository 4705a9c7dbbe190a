"""Where the journal has the tokens of a response, and what each was sampled under: there are a great many such places.

Those of a response are bytes: where among them the last long one begins, then units of 13 bytes, one for a chunk much
like that one, two for any other chunk, three for whatever is no chunk.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from april.wire.version import Version

HEAD, UNIT, LONG = struct.Struct("<I"), struct.Struct("<IIIB"), struct.Struct("<IIIBIIIB")
"""A short place: bytes of the journal from the long one's record to its own, checksum, offset << 8 | steps since the
long one's, `EQUAL` + tokens that it has more. A long one: record below 2^32, checksum, offset, `CHUNK` or `ODD`; tokens
with `OBSERVED`, step, record above 2^32 | branch below 2^16 << 16, branch above. `ODD` goes on with size and branch."""
EQUAL, ODD, CHUNK = 126, 254, 255
WORD, LOW, OBSERVED = 32, (1 << 32) - 1, 1 << 31
HALF, LOW_HALF = 16, (1 << 16) - 1
SINCE, OFFSET, BRANCHES = 1 << 8, 1 << 24, 1 << 24
"""what there is room for"""
TOKEN_BYTES = 8
"""of a chunk's payload without supports"""

Segment = tuple[int, int, Version]
"""(start, end, version) of tokens that the policy has sampled"""


class Place(NamedTuple):
    """Where the journal has the tokens of a chunk or an observation."""

    record: int
    """position of its record"""
    offset: int
    """from there to its payload"""
    size: int
    """bytes of the payload"""
    checksum: int
    tokens: int
    observed: bool
    """not to be trained here: an observation, or another branch's"""
    branch: int = 0
    step: int = 0
    """of the version that it was sampled under"""


def add_place(
    places: bytes, record: int, offset: int, size: int, checksum: int, tokens: int, observed: int, branch: int,
    step: int,
) -> bytes:  # fmt: skip
    """The places of a response with one more, as in `Place`."""
    is_chunk = size == TOKEN_BYTES * tokens and not observed and branch < BRANCHES
    if places and is_chunk and offset < OFFSET:
        (at,) = HEAD.unpack_from(places)
        low, _, _, kind, content, long_step, rest, top = LONG.unpack_from(places, at)
        apart, since, more = record - ((rest & LOW_HALF) << WORD | low), step - long_step, tokens - content + EQUAL
        same = kind == CHUNK and branch == top << HALF | rest >> HALF
        if same and 0 <= apart <= LOW and 0 <= since < SINCE and 0 <= more < ODD:
            return places + UNIT.pack(apart, checksum, offset * SINCE | since, more)
    kind, content = CHUNK if is_chunk else ODD, tokens | (OBSERVED if observed else 0)
    rest = record >> WORD | (branch & LOW_HALF) << HALF
    long = LONG.pack(record & LOW, checksum, offset, kind, content, step, rest, branch >> HALF & (SINCE - 1))
    if not is_chunk:
        long += UNIT.pack(size, branch, 0, 0)
    return HEAD.pack(len(places) or HEAD.size) + places[HEAD.size :] + long


def places_in(places: bytes) -> Iterator[Place]:
    pieces, new = UNIT.iter_unpack(memoryview(places)[HEAD.size :]), tuple.__new__
    long_record = long_step = long_tokens = branch = 0
    for first, checksum, stretch, more in pieces:
        if more < ODD:
            tokens, record, step = long_tokens + more, long_record + first, long_step + stretch % SINCE
            yield new(Place, (record, stretch // SINCE, TOKEN_BYTES * tokens, checksum, tokens, False, branch, step))
            continue
        content, long_step, rest, top = next(pieces)
        tokens, long_record, branch = content % OBSERVED, (rest & LOW_HALF) << WORD | first, top << HALF | rest >> HALF
        size, long_tokens = TOKEN_BYTES * tokens, tokens - EQUAL
        if more == ODD:
            size, branch, _, _ = next(pieces)
        yield Place(long_record, stretch, size, checksum, tokens, content >= OBSERVED, branch, long_step)


def segments_in(places: bytes) -> list[Segment]:
    """What the policy has sampled, in order; between them are observations. Neighbours under one version are one."""
    segments: list[Segment] = []
    pieces, start, end = UNIT.iter_unpack(memoryview(places)[HEAD.size :]), 0, 0
    sampled_under: tuple[int, int] | None = None
    """the version of the tokens before `end`, None of an observation"""
    long_step = long_tokens = branch = 0
    for _, _, stretch, more in pieces:
        if more < ODD:
            tokens = long_tokens + more
            version: tuple[int, int] | None = (branch, long_step + stretch % SINCE)
        else:
            content, long_step, rest, top = next(pieces)
            tokens, branch = content % OBSERVED, top << HALF | rest >> HALF
            long_tokens = tokens - EQUAL
            if more == ODD:
                _, branch, _, _ = next(pieces)
            version = None if content >= OBSERVED else (branch, long_step)
        if version != sampled_under:
            if sampled_under:
                segments.append((start, end, Version(*sampled_under)))
            sampled_under, start = version, end
        end += tokens
    if sampled_under:
        segments.append((start, end, Version(*sampled_under)))
    return segments
