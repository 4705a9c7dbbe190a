"""Packed references from a response's chunks to their tokens in the journal; a run holds millions of them.

The references of one response are one bytes object: a uint32 offset of the last full reference in it, then units of 13
bytes. A delta-encoded chunk reference takes one unit, a full chunk reference two, and any other full reference (an
observation, or a payload of unusual size) three.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from april.wire.message import Version

HEAD, UNIT, FULL = struct.Struct("<I"), struct.Struct("<IIIB"), struct.Struct("<IIIBIIIB")
"""Layouts of the header, of a delta and of a full reference.

Delta: record position minus that of the last full reference; checksum; offset << 8 | step minus the full reference's
step; `EQUAL` + tokens minus the full reference's tokens.
Full: low 32 bits of the record position; checksum; offset; `CHUNK` or `ODD`; tokens, with the `OBSERVED` bit; step;
high bits of the record position | low 16 bits of the incarnation << 16; high 8 bits of the incarnation.
An `ODD` reference has a further unit with payload size and incarnation.
The constants: a unit's last byte is `CHUNK` in a full reference of a chunk, `ODD` in any other full reference, and
less in a delta, where `EQUAL` stands for no difference; `OBSERVED` is the bit that is set for an observation.
"""
EQUAL, ODD, CHUNK = 126, 254, 255
WORD, LOW, OBSERVED = 32, (1 << 32) - 1, 1 << 31
HALF, LOW_HALF = 16, (1 << 16) - 1
MAX_STEPS, MAX_OFFSET, MAX_INCARNATION = 1 << 8, 1 << 24, 1 << 24
"""Exclusive limits of a delta's step difference and offset, and of a chunk's incarnation."""
TOKEN_BYTES = 8
"""Payload bytes per token of a chunk without supports: an int32 id and a float32 log-probability."""

Segment = tuple[int, int, Version]
"""(start, end, version) of a run of response tokens sampled under one policy version."""


class ChunkRef(NamedTuple):
    """Reference to the tokens of one chunk or observation in the journal."""

    record: int
    """Journal position of the record, bytes from the beginning of the run."""
    offset: int
    """Bytes from the record's beginning to the payload."""
    size: int
    """Payload length, bytes."""
    checksum: int
    """Crc32 of the referenced payload."""
    tokens: int
    observed: bool
    """True for tokens that are not trained in this sample: an observation, or tokens shared with another fork."""
    incarnation: int = 0
    """Learner incarnation of the version that sampled the tokens."""
    step: int = 0
    """Policy step of the version that sampled the tokens."""


def add_chunk_ref(
    refs: bytes, record: int, offset: int, size: int, checksum: int, tokens: int, observed: int, incarnation: int,
    step: int,
) -> bytes:  # fmt: skip
    """Append one reference, given by the fields of `ChunkRef`, to a response's packed references."""
    is_chunk = size == TOKEN_BYTES * tokens and not observed and incarnation < MAX_INCARNATION
    if refs and is_chunk and offset < MAX_OFFSET:
        (last_full,) = HEAD.unpack_from(refs)
        low, _, _, kind, token_word, full_step, high_bits, top = FULL.unpack_from(refs, last_full)
        distance = record - ((high_bits & LOW_HALF) << WORD | low)
        steps, delta = step - full_step, tokens - token_word + EQUAL
        same = kind == CHUNK and incarnation == top << HALF | high_bits >> HALF
        if same and 0 <= distance <= LOW and 0 <= steps < MAX_STEPS and 0 <= delta < ODD:
            return refs + UNIT.pack(distance, checksum, offset * MAX_STEPS | steps, delta)
    kind, token_word = CHUNK if is_chunk else ODD, tokens | (OBSERVED if observed else 0)
    high_bits = record >> WORD | (incarnation & LOW_HALF) << HALF
    top = incarnation >> HALF & 255
    full = FULL.pack(record & LOW, checksum, offset, kind, token_word, step, high_bits, top)
    if not is_chunk:
        full += UNIT.pack(size, incarnation, 0, 0)
    return HEAD.pack(len(refs) or HEAD.size) + refs[HEAD.size :] + full


def chunk_refs_in(refs: bytes) -> Iterator[ChunkRef]:
    """Unpack the references of a response, in order."""
    units, new = UNIT.iter_unpack(memoryview(refs)[HEAD.size :]), tuple.__new__
    full_record = full_step = full_tokens = incarnation = 0
    for first, checksum, offset_and_step, delta in units:
        if delta < ODD:
            tokens, record, step = full_tokens + delta, full_record + first, full_step + offset_and_step % MAX_STEPS
            size, offset = TOKEN_BYTES * tokens, offset_and_step // MAX_STEPS
            yield new(ChunkRef, (record, offset, size, checksum, tokens, False, incarnation, step))
            continue
        token_word, full_step, high_bits, top = next(units)
        full_record, incarnation = (high_bits & LOW_HALF) << WORD | first, top << HALF | high_bits >> HALF
        tokens = token_word % OBSERVED
        size, full_tokens = TOKEN_BYTES * tokens, tokens - EQUAL
        if delta == ODD:
            size, incarnation, _, _ = next(units)
        observed = token_word >= OBSERVED
        yield ChunkRef(full_record, offset_and_step, size, checksum, tokens, observed, incarnation, full_step)


def segments_in(refs: bytes) -> list[Segment]:
    """Token spans that the policy sampled, in order; neighbouring chunks under one version are merged."""
    segments: list[Segment] = []
    units, start, end = UNIT.iter_unpack(memoryview(refs)[HEAD.size :]), 0, 0
    sampled_under: tuple[int, int] | None = None
    """(incarnation, step) of the version that sampled the latest tokens, which end at `end`; None if they are an
    observation."""
    full_step = full_tokens = incarnation = 0
    for _, _, offset_and_step, delta in units:
        if delta < ODD:
            tokens = full_tokens + delta
            version: tuple[int, int] | None = (incarnation, full_step + offset_and_step % MAX_STEPS)
        else:
            token_word, full_step, high_bits, top = next(units)
            tokens, incarnation = token_word % OBSERVED, top << HALF | high_bits >> HALF
            full_tokens = tokens - EQUAL
            if delta == ODD:
                _, incarnation, _, _ = next(units)
            version = None if token_word >= OBSERVED else (incarnation, full_step)
        if version != sampled_under:
            if sampled_under:
                segments.append((start, end, Version(*sampled_under)))
            sampled_under, start = version, end
        end += tokens
    if sampled_under:
        segments.append((start, end, Version(*sampled_under)))
    return segments
