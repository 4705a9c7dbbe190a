"""Where the journal has the tokens of a response, and what each was sampled under: there are a great many such places.

Those of a response are bytes, one behind the other: 16 for a chunk that is much like the first, 32 for whatever is not.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from april.wire.version import Version

SHORT = struct.Struct("<IHHII")
"""record below 2^32 and above, tokens, checksum, offset << 10 | steps since the first; one without tokens is long"""
LONG, FIRST = struct.Struct("<IHHIIIIII"), struct.Struct("<24xII")
"""such a one with the whole offset, then size, tokens with `OBSERVED`, branch and step; the last two of the first"""
WORD, LOW, OBSERVED = 32, (1 << 32) - 1, 1 << 31
TOKENS, SINCE, OFFSET = 1 << 16, 1 << 10, 1 << 22
"""what a short one has room for"""
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
    if places and size == TOKEN_BYTES * tokens and not observed and tokens < TOKENS and offset < OFFSET:
        first_branch, first_step = FIRST.unpack_from(places)
        if branch == first_branch and 0 <= step - first_step < SINCE:
            stretch = offset * SINCE | step - first_step
            return places + SHORT.pack(record & LOW, record >> WORD, tokens, checksum, stretch)
    content = tokens | (OBSERVED if observed else 0)
    return places + LONG.pack(record & LOW, record >> WORD, 0, checksum, offset, size, content, branch, step)


def places_in(places: bytes) -> Iterator[Place]:
    first_branch, first_step = FIRST.unpack_from(places) if places else (0, 0)
    pieces, new = SHORT.iter_unpack(places), tuple.__new__
    for low, high, tokens, checksum, stretch in pieces:
        record = high << WORD | low
        if tokens:
            step, size = first_step + stretch % SINCE, TOKEN_BYTES * tokens
            yield new(Place, (record, stretch // SINCE, size, checksum, tokens, False, first_branch, step))
        else:
            size, few, many, branch, step = next(pieces)
            tokens, observed = (many << 16 | few) & (OBSERVED - 1), many >= OBSERVED >> 16
            yield Place(record, stretch, size, checksum, tokens, observed, branch, step)


def segments_in(places: bytes) -> list[Segment]:
    """What the policy has sampled, in order; between them are observations. Neighbours under one version are one."""
    first_branch, first_step = FIRST.unpack_from(places) if places else (0, 0)
    segments: list[Segment] = []
    pieces, start, end = SHORT.iter_unpack(places), 0, 0
    sampled_under: tuple[int, int] | None = None
    """the version of the tokens before `end`, None of an observation"""
    for _, _, tokens, _, stretch in pieces:
        if tokens:
            version: tuple[int, int] | None = (first_branch, first_step + stretch % SINCE)
        else:
            _, few, many, branch, step = next(pieces)
            tokens = (many << 16 | few) & (OBSERVED - 1)
            version = None if many >= OBSERVED >> 16 else (branch, step)
        if version != sampled_under:
            if sampled_under:
                segments.append((start, end, Version(*sampled_under)))
            sampled_under, start = version, end
        end += tokens
    if sampled_under:
        segments.append((start, end, Version(*sampled_under)))
    return segments
