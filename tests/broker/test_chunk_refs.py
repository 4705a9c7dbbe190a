"""Packed chunk references unpack to the same references, and a sample's segments follow from them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from april.broker.ledger.chunk_refs import FULL, HEAD, UNIT, ChunkRef, add_chunk_ref, chunk_refs_in, segments_in
from april.wire.message import Version

NUMBERS, RECORDS, TOKENS = st.integers(0, 2**32 - 1), st.integers(0, 2**48 - 1), st.integers(1, 2**31 - 1)
ODD = st.builds(ChunkRef, RECORDS, NUMBERS, NUMBERS, NUMBERS, TOKENS, st.booleans(), NUMBERS, NUMBERS)
EDGES = [0, 1, 2**8 - 1, 2**8, 2**16, 2**24 - 1, 2**24, 2**32 - 1]


@st.composite
def chunks(draw):
    """Strategy for chunks as workers report them, with sizes and versions at the limits of the delta encoding."""
    tokens = draw(st.sampled_from([1, 60, 186, 187, 188, 313, 314, 315, 2**29 - 1]))
    record = draw(st.sampled_from([0, 7, 2**40])) + draw(st.sampled_from([*EDGES, 2**32]))
    numbers = [draw(st.sampled_from(EDGES)) for _ in range(3)]
    return ChunkRef(record, numbers[0], 8 * tokens, numbers[1], tokens, False, draw(st.integers(0, 1)), numbers[2])


def packed(refs):
    data = b""
    for ref in refs:
        data = add_chunk_ref(data, *ref)
    return data


@given(st.lists(ODD | chunks()))
def test_references_are_unpacked_as_they_were_packed(refs):
    assert list(chunk_refs_in(packed(refs))) == refs


def test_a_delta_encoded_reference_takes_half_the_bytes_of_a_full_one():
    first = ChunkRef(10**12, 600, 480, 1, 60, False, 3, 7)
    most = {"record": 10**12 + 2**32 - 1, "offset": 2**24 - 1, "size": 8 * 187, "tokens": 187, "step": 262}
    later = first._replace(checksum=2**32 - 1, **most)
    assert len(packed([first, later])) == HEAD.size + FULL.size + UNIT.size == HEAD.size + 3 * UNIT.size
    beyond = [{"record": 10**12 + 2**32}, {"offset": 2**24}, {"size": 8 * 188, "tokens": 188}, {"step": 263}]
    before = [{"record": 10**12 - 1}, {"step": 6}, {"incarnation": 2}, {"observed": True}, {"size": 484}]
    for other in (*beyond, *before):
        odd = later._replace(**other)
        refs = [first, odd, odd, later]
        assert len(packed(refs[:2])) >= HEAD.size + 2 * FULL.size and list(chunk_refs_in(packed(refs))) == refs


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans(), st.integers(0, 1), st.integers(0, 2)), max_size=20))
def test_neighbouring_tokens_of_one_version_are_one_segment(spans):
    """Spans are (tokens, whether they are an observation, weights incarnation, policy step)."""
    versions = [
        None if observed else Version(incarnation, step) for n, observed, incarnation, step in spans for _ in range(n)
    ]
    segments = segments_in(packed(ChunkRef(0, 0, 8 * n, 0, n, *rest) for n, *rest in spans))
    unpacked = [None] * len(versions)
    for start, end, version in segments:
        unpacked[start:end] = [version] * (end - start)
    assert unpacked == versions
    assert all(first[1] < second[0] or first[2] != second[2] for first, second in pairwise(segments))
