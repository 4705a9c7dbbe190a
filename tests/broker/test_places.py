"""The places of a response are a list of `Place` that takes less room; its segments follow from them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from april.broker.ledger.places import HEAD, LONG, UNIT, Place, add_place, places_in, segments_in
from april.wire.version import Version

NUMBERS, RECORDS, TOKENS = st.integers(0, 2**32 - 1), st.integers(0, 2**48 - 1), st.integers(1, 2**31 - 1)
ODD = st.builds(Place, RECORDS, NUMBERS, NUMBERS, NUMBERS, TOKENS, st.booleans(), NUMBERS, NUMBERS)
EDGES = [0, 1, 2**8 - 1, 2**8, 2**16, 2**24 - 1, 2**24, 2**32 - 1]


@st.composite
def chunks(draw):
    """As workers report them, of sizes and versions at the edges of what a short place can say."""
    tokens = draw(st.sampled_from([1, 60, 186, 187, 188, 313, 314, 315, 2**29 - 1]))
    record = draw(st.sampled_from([0, 7, 2**40])) + draw(st.sampled_from([*EDGES, 2**32]))
    numbers = [draw(st.sampled_from(EDGES)) for _ in range(3)]
    return Place(record, numbers[0], 8 * tokens, numbers[1], tokens, False, draw(st.integers(0, 1)), numbers[2])


def packed(places):
    data = b""
    for place in places:
        data = add_place(data, *place)
    return data


@given(st.lists(ODD | chunks()))
def test_what_goes_in_comes_out(places):
    assert list(places_in(packed(places))) == places


def test_a_chunk_much_like_the_last_other_one_takes_half_the_room():
    first = Place(10**12, 600, 480, 1, 60, False, 3, 7)
    most = {"record": 10**12 + 2**32 - 1, "offset": 2**24 - 1, "size": 8 * 187, "tokens": 187, "step": 262}
    later = first._replace(checksum=2**32 - 1, **most)
    assert len(packed([first, later])) == HEAD.size + LONG.size + UNIT.size == HEAD.size + 3 * UNIT.size
    beyond = [{"record": 10**12 + 2**32}, {"offset": 2**24}, {"size": 8 * 188, "tokens": 188}, {"step": 263}]
    before = [{"record": 10**12 - 1}, {"step": 6}, {"branch": 2}, {"observed": True}, {"size": 484}]
    for other in (*beyond, *before):
        odd = later._replace(**other)
        places = [first, odd, odd, later]
        assert len(packed(places[:2])) >= HEAD.size + 2 * LONG.size and list(places_in(packed(places))) == places


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans(), st.integers(0, 1), st.integers(0, 2)), max_size=20))
def test_tokens_that_follow_under_the_same_version_are_one_segment(spans):
    """Spans are (tokens, whether they are an observation, branch, step)."""
    versions = [None if observed else Version(branch, step) for n, observed, branch, step in spans for _ in range(n)]
    segments = segments_in(packed(Place(0, 0, 8 * n, 0, n, *rest) for n, *rest in spans))
    told = [None] * len(versions)
    for start, end, version in segments:
        told[start:end] = [version] * (end - start)
    assert told == versions
    assert all(one[1] < other[0] or one[2] != other[2] for one, other in pairwise(segments))
