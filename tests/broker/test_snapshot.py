"""A damaged snapshot is skipped in favour of the one before it, whatever the damage."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.broker.journal.snapshot import SnapshotStore, freeze, live_positions, thaw
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.wire.message import Version

OLDER, NEWER = 100, 200


def small_ledger():
    """A ledger with three groups, one of them with tokens, and references into a journal."""
    places = iter(range(0, 1000, 10))
    ledger = Ledger(Rules(2, 2, 3), write=lambda event, arrays: (next(places), 10))
    ledger.start_learner(0)
    groups = [ledger.open_group(epoch=0, row=row, floor=0, prompt=b"\1\0\0\0") for row in range(3)]
    lease = ledger.lease(groups[0].samples[1], "w0", step=0, expires_at=1.0)
    ledger.add_chunk(lease.id, 0, 5, Version(0, 0))
    ledger.add_chunk(lease.id, 5, 4, Version(0, 0))
    return ledger


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, image): a ledger's image, stored as snapshots at two journal positions."""
    folder = tmp_path_factory.mktemp("snapshots")
    image = freeze(small_ledger())
    for position in (OLDER, NEWER):
        SnapshotStore(folder).write(position, image)
    return folder, image


def read(folder):
    """(position, image) of the undamaged snapshots, newest first; each image has been loaded into a ledger and stored
    again."""
    found = []
    for position, image in SnapshotStore(folder).newest_first():
        ledger = Ledger(Rules(2, 2, 3))
        thaw(image, ledger)
        found.append((position, freeze(ledger)))
    return found


def test_a_snapshot_is_read_as_it_was_written(written):
    folder, image = written
    assert read(folder) == [(NEWER, image), (OLDER, image)]


@given(data=st.data())
def test_a_damaged_snapshot_is_skipped(written, data):
    folder, image = written
    path = folder / f"{NEWER:020d}.snapshot"
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytes([whole[at] ^ data.draw(st.integers(1, 255))])
    path.write_bytes(whole[:at] + data.draw(st.sampled_from([b"", flipped + whole[at + 1 :]])))
    try:
        assert read(folder) == [(OLDER, image)]
    finally:
        path.write_bytes(whole)


def values_of(thing):
    """Field values of a group, sample or lease by name, without those that refer to other such objects, and without
    expiry times, which the broker sets anew after a restart."""
    followed = ("group", "sample", "samples", "expires_at", "ends_at")
    return {field.name: getattr(thing, field.name) for field in fields(thing) if field.name not in followed}


def test_a_thawed_ledger_equals_the_frozen_one():
    ledger = small_ledger()
    [partial] = ledger.leases
    ledger.end_lease(partial, "lost", "its worker fell over")
    sample = ledger.lease(ledger.groups[1].samples[0], "w1", step=0, expires_at=1.0).sample
    [done] = ledger.leases
    ledger.add_chunk(done, 0, 7, Version(0, 0), "stop")
    ledger.score(done, 0.5, {"correct": 1.0})
    ledger.lease(ledger.groups[2].samples[1], "w2", step=0, expires_at=1.0)
    again = Ledger(ledger.rules)
    thaw(freeze(ledger), again)
    assert freeze(again) == freeze(ledger)
    for group, twin in zip(ledger.groups.values(), again.groups.values(), strict=True):
        assert values_of(group) == values_of(twin)
        assert list(map(values_of, group.samples)) == list(map(values_of, twin.samples))
    assert list(map(values_of, ledger.leases.values())) == list(map(values_of, again.leases.values()))
    lost, scored = again.groups[0].samples[1], again.groups[1].samples[0]
    assert (lost.attempts, lost.length, lost.last_error) == (1, 9, "its worker fell over")
    assert (scored.reward, scored.details) == (sample.reward, sample.details) == (0.5, {"correct": 1.0})


def test_live_positions_are_the_prompts_and_chunks_of_kept_groups():
    ledger = small_ledger()
    chunks = [ref.record for ref in ledger.groups[0].samples[1].chunk_refs]
    assert len(chunks) == 2
    assert sorted(live_positions(ledger)) == sorted([*(group.prompt[0] for group in ledger.groups.values()), *chunks])
    ledger.discard(ledger.groups[0], "filtered")
    assert sorted(live_positions(ledger)) == [group.prompt[0] for group in ledger.groups.values()]
