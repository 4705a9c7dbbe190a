"""Decoding inverts encoding; anything that is not a message raises WireError and nothing else."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april import wire
from april.wire import limits
from april.wire.message import Version

TASK = wire.Task(4, False, "12", "final_answer", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
GRANT = wire.Grant(
    lease_id=(3 << 32) | 7, task_index=0, index=1, scoring=False, max_new_tokens=9, seed=2**62, finish_reason="",
    hand_over=False, group_scored=[], turns=0, turn_start=0, state=b"", stop_token_ids=[],
)  # fmt: skip
REPORT = wire.Report([wire.Scored(7, [1.0], [{"right": 1.0}]), wire.GiveBack(8, 3, "leave")])
HEAD = wire.SampleHead(0, 3, 1.0, "stop", [(0, 3, Version(0, 1))])
EXAMPLES = [
    (wire.Hello("worker", "w0", "u", [1, 2]), []),
    (wire.Grants([TASK], [GRANT]), [np.arange(5, dtype="i4"), np.arange(2, dtype="i4")]),
    (REPORT, [np.arange(48, dtype="u1"), np.ones(24, "u1")]),
    (
        wire.Batch(4, 0, 1, [wire.GroupHead(9, 2, [HEAD])]),
        [np.arange(2, dtype="i4"), np.arange(3, dtype="i4"), np.zeros(3, "f4")],
    ),
    (wire.Consumed(4, {"loss": 0.5}), []),
    (wire.Status(), [np.frombuffer(b"{}", np.uint8)]),
    (wire.Report(), [np.empty(0, "u1"), np.empty(0, "u1")]),
]


def frames_of(message, arrays):
    return [bytes(frame) for frame in wire.encode(message, arrays, session=5, sequence=6)]


@pytest.mark.parametrize(("message", "arrays"), EXAMPLES)
def test_decode_inverts_encode(message, arrays):
    received = wire.decode(frames_of(message, arrays))
    assert (received.message, received.session, received.sequence) == (message, 5, 6)
    assert [(a.dtype, a.tolist()) for a in received.arrays] == [(a.dtype, a.tolist()) for a in arrays]


def test_half_a_surrogate_pair_in_a_text_does_not_stop_the_message():
    """As in the message of an error that somebody's verifier raised. Bytes stay as they are."""
    closed = wire.Closed(7, state=b"\xff\x00")
    report = wire.Report([wire.GiveBack(8, 3, "leave", "a\ud800b"), closed, wire.Scored(7, [1.0], [{"\udfff": 1.0}])])
    lost = "\N{REPLACEMENT CHARACTER}"
    expected = [wire.GiveBack(8, 3, "leave", f"a{lost}b"), closed, wire.Scored(7, [1.0], [{lost: 1.0}])]
    assert wire.decode(frames_of(report, [])).message == wire.Report(expected)


def test_every_message_has_a_tag_of_its_own():
    names = [kind.__name__ for kind in wire.MESSAGES]
    assert len(names) == len(set(names))


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_arbitrary_frames_raise_only_wire_errors(frames):
    with pytest.raises(wire.WireError):
        wire.decode(frames)


@settings(max_examples=500)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_is_refused_or_harmless(example, data):
    """A flipped bit, a cut or a lost frame is detected, or still decodes to a well-typed message."""
    frames = frames_of(*example)
    which = data.draw(st.sampled_from([index for index, frame in enumerate(frames) if frame]))
    damage = data.draw(st.sampled_from(["flip", "cut", "drop", "repeat"]))
    if damage == "drop":
        del frames[which]
    elif damage == "repeat":
        frames.insert(which, frames[which])
    elif damage == "cut":
        frames[which] = frames[which][:-1]
    else:
        at = data.draw(st.integers(0, len(frames[which]) - 1))
        flipped = frames[which][at] ^ (1 << data.draw(st.integers(0, 7)))
        frames[which] = frames[which][:at] + bytes([flipped]) + frames[which][at + 1 :]
    try:
        received = wire.decode(frames)
    except wire.WireError:
        return
    assert isinstance(received.message, tuple(wire.MESSAGES))
    assert which < 2, "damage in an array must be found by its checksum"


@pytest.mark.parametrize("length", [2**63, 2**40, -1, 2, 4, [3], "3", None])
def test_an_array_of_another_length_than_its_bytes_is_a_wire_error(length):
    frames = frames_of(*EXAMPLES[2])
    body = msgspec.msgpack.decode(frames[1])
    body[1][0][1] = length
    frames[1] = msgspec.msgpack.encode(body)
    with pytest.raises(wire.WireError):
        wire.decode(frames)


def test_an_array_with_another_checksum_is_refused():
    *head, arrays = frames_of(*EXAMPLES[2])
    with pytest.raises(wire.WireError, match="checksum"):
        wire.decode([*head, bytes([arrays[0] ^ 1]) + arrays[1:]])


def test_a_message_larger_than_its_limits_is_refused_before_it_is_decoded():
    small = limits.Limits(frame_bytes=1 << 20, frames=3, arrays=4, message_bytes=64, body_bytes=1 << 10)
    with pytest.raises(wire.WireError, match="too large"):
        wire.decode([b"no message", bytes(64)], small)


def test_arrays_are_joined_up_to_a_limit_and_a_larger_one_goes_alone(monkeypatch):
    monkeypatch.setattr(wire.codec, "MAX_JOINED_BYTES", 16)
    arrays = [np.arange(length, dtype="i4") for length in (0, 1, 2, 3, 9, 0, 1, 0)]
    frames = frames_of(wire.Batch(0, 0, 0, []), arrays)
    assert [len(frame) for frame in frames[2:]] == [12, 12, 36, 4]
    assert [array.tolist() for array in wire.decode(frames).arrays] == [array.tolist() for array in arrays]


@pytest.mark.parametrize("split", [[8], [4, 4], [0, 8], [8, 0], [3, 5], [8, 1], [7]])
def test_frames_hold_whole_arrays_and_nothing_else(split):
    """`split`: sizes of the frames that carry two arrays of one token each."""
    header, body, arrays = frames_of(wire.Report(), [np.ones(1, "i4"), np.ones(1, "f4")])
    rest = iter(arrays + bytes(8))
    frames = [header, body, *(bytes(next(rest) for _ in range(size)) for size in split)]
    if split in ([8], [4, 4]):
        assert [array.tolist() for array in wire.decode(frames).arrays] == [[1], [1.0]]
    else:
        with pytest.raises(wire.WireError):
            wire.decode(frames)
