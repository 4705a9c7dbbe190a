"""Segments are a list of (start, end, version) that takes less room."""

from hypothesis import given
from hypothesis import strategies as st

from april.broker.ledger.segments import Segments
from april.wire.version import Version

NUMBERS = st.integers(0, 2**32 - 1)
SPANS = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)), max_size=20)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.builds(Version, NUMBERS, NUMBERS))))
def test_what_goes_in_comes_out(segments):
    compact = Segments(segments)
    assert compact == segments and list(compact) == segments and len(compact) == len(segments)
    assert [compact[place] for place in range(-len(segments), len(segments))] == segments * 2
    assert all(isinstance(version, Version) for _, _, version in compact)
    assert Segments.from_bytes(compact.to_bytes()) == segments
    assert (compact.end, compact.last_step) == ((segments[-1][1], segments[-1][2].step) if segments else (0, 0))


@given(SPANS)
def test_tokens_that_follow_under_the_same_version_join_the_last_segment(spans):
    """Spans are (tokens, gap before them, branch, step)."""
    compact, plain, end = Segments(), [], 0
    for tokens, gap, branch, step in spans:
        start, version = end + gap, Version(branch, step)
        end = start + tokens
        compact.extend_by(start, end, *version)
        if plain and plain[-1][1:] == (start, version):
            plain[-1] = (plain[-1][0], end, version)
        else:
            plain.append((start, end, version))
    assert compact == plain
