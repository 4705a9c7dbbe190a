"""What was synced is there after any crash; what is damaged is never passed over in silence."""

import errno
import os
from contextlib import closing

import msgpack
import pytest

from april.broker.events import ChunkAccepted, RoundStarted
from april.broker.journal import Journal, JournalError
from april.version import Version


@pytest.fixture
def written(tmp_path):
    """A folder with ten synced records, and the offset behind each."""
    journal = Journal(tmp_path)
    ends = [sum(journal.append(chunk(number))) for number in range(10)]
    journal.sync()
    journal.close()
    return tmp_path, journal.path, ends


def chunk(number):
    return ChunkAccepted(number, 0, 2, Version(0, number), "", b"\x01\x00\x00\x00" * 2, b"\x00" * 8)


def replayed(folder):
    with closing(Journal(folder)) as journal:
        return [event for event, _ in journal.replay()]


def test_replay_gives_back_what_was_appended(written):
    assert replayed(written[0]) == [chunk(number) for number in range(10)]


def test_a_reference_reads_its_own_record_before_and_after_the_sync(tmp_path):
    journal = Journal(tmp_path)
    references = [journal.append(chunk(number)) for number in range(5)]
    assert journal.read(references[3]) == chunk(3)
    journal.sync()
    assert [journal.read(reference) for reference in references] == [chunk(number) for number in range(5)]


def test_a_cut_at_any_byte_loses_only_the_records_it_cuts(written):
    folder, path, ends = written
    whole = path.read_bytes()
    for length in range(len(whole), -1, -1):
        path.write_bytes(whole[:length])
        assert len(replayed(folder)) == sum(end <= length for end in ends)
        assert path.stat().st_size in (0, *ends)


def test_after_a_cut_the_journal_goes_on_behind_the_last_good_record(written):
    folder, path, _ = written
    path.write_bytes(path.read_bytes()[:-1])
    journal = Journal(folder)
    assert len(list(journal.replay())) == 9
    journal.append(RoundStarted(7))
    journal.close()
    assert replayed(folder) == [*(chunk(number) for number in range(9)), RoundStarted(7)]


def test_damage_before_the_last_record_is_refused(written):
    folder, path, ends = written
    whole = path.read_bytes()
    for at in range(ends[-2]):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match="damaged at byte"):
            replayed(folder)


def test_any_messagepack_reader_can_stream_it(written):
    with written[1].open("rb") as file:
        records = list(msgpack.Unpacker(file))
    assert [msgpack.unpackb(body)[:2] for _, body in records] == [["ChunkAccepted", number] for number in range(10)]


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_after_a_failed_write_nothing_is_accepted_but_reading_goes_on(tmp_path, monkeypatch, call):
    journal = Journal(tmp_path)
    reference = journal.append(chunk(0))
    journal.sync()

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    journal.append(chunk(1))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(JournalError, match="No space left"):
        journal.sync()
    monkeypatch.undo()
    with pytest.raises(JournalError):
        journal.sync()
    with pytest.raises(JournalError):
        journal.append(chunk(2))
    assert journal.read(reference) == chunk(0)


def test_a_second_broker_on_the_same_journal_is_refused(tmp_path):
    first = Journal(tmp_path)
    with pytest.raises(JournalError, match="in use"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()
