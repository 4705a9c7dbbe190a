"""Synced records survive any crash, and damage is never skipped silently."""

import errno
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from contextlib import closing
from pathlib import Path

import msgpack
import pytest

from april.broker.journal import journal as journal_module
from april.broker.journal import records
from april.broker.journal.files import JournalError, file_path, file_starts, reclaimable_files
from april.broker.journal.journal import Journal
from april.broker.ledger.events import RoundStarted, SampleScored

ROOT = Path(__file__).parents[2]
ARRAYS = [(zlib.crc32(data), data) for data in (b"\x01\x00\x00\x00" * 2, b"\xcf" * 8)]


@pytest.fixture
def written(tmp_path):
    """(folder, file, ends): a journal with ten records, each synced, and the end position of each record."""
    with closing(Journal(tmp_path)) as journal:
        ends = []
        for number in range(10):
            ends.append(sum(journal.append(fact(number), ARRAYS)))
            journal.sync()
    (path,) = tmp_path.glob("*.msgpack")
    return tmp_path, path, ends


def fact(number):
    return SampleScored(number, 1.0)


def replayed(folder, position=0):
    with closing(Journal(folder)) as journal:
        return [event for event, _ in journal.replay(position)]


def test_replay_gives_back_what_was_appended(written):
    with closing(Journal(written[0])) as journal:
        found = [journal.read(reference) for _, reference in journal.replay()]
    assert found == [(fact(number), ARRAYS) for number in range(10)]


def test_a_reference_reads_its_own_record_before_and_after_the_sync(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        references = [journal.append(fact(number), ARRAYS) for number in range(5)]
        assert journal.read(references[3]) == (fact(3), ARRAYS)
        journal.sync()
        assert [journal.read(reference)[0] for reference in references] == [fact(number) for number in range(5)]


def test_a_truncation_at_any_byte_loses_only_the_records_behind_it(written):
    folder, path, ends = written
    whole = path.read_bytes()
    for length in range(len(whole), -1, -1):
        path.write_bytes(whole[:length])
        assert len(replayed(folder)) == sum(end <= length for end in ends)
        assert path.stat().st_size in (0, *ends)


def test_after_a_truncation_the_journal_goes_on_after_the_last_good_record(written):
    folder, path, ends = written
    path.write_bytes(path.read_bytes()[:-1])
    with closing(Journal(folder)) as journal:
        assert len(list(journal.replay())) == 9 and path.stat().st_size == ends[8]
        journal.append(RoundStarted(7))
    assert replayed(folder) == [*(fact(number) for number in range(9)), RoundStarted(7)]


def test_damage_before_the_last_sync_is_refused(written):
    folder, path, ends = written
    whole = path.read_bytes()
    for at in range(ends[-2]):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match="damaged at position"):
            replayed(folder)


def test_the_pages_of_an_unfinished_sync_may_reach_the_disk_in_any_order(written):
    """A crash may leave a hole before a good record of the same unfinished sync: both are cut off."""
    folder, path, ends = written
    with closing(Journal(folder)) as journal:
        list(journal.replay())
        hole = journal.append(fact(10), ARRAYS)
        journal.append(fact(11), ARRAYS)
    whole = bytearray(path.read_bytes())
    whole[hole[0] : sum(hole)] = bytes(hole[1])
    path.write_bytes(whole)
    assert replayed(folder) == [fact(number) for number in range(10)]
    assert path.stat().st_size == ends[-1]


def test_any_messagepack_reader_can_stream_it(written):
    with written[1].open("rb") as file:
        records = list(msgpack.Unpacker(file))
    for number, (synced, checksum, event, *arrays) in enumerate(records):
        assert synced == (0, *written[2])[number]
        assert checksum == zlib.crc32(event, zlib.crc32(synced.to_bytes(8)))
        assert msgpack.unpackb(event)[:2] == ["SampleScored", number]
        assert list(zip(arrays[::2], arrays[1::2], strict=True)) == ARRAYS
    assert len(records) == 10


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_after_a_failed_write_nothing_is_accepted_but_reading_goes_on(tmp_path, monkeypatch, call):
    journal = Journal(tmp_path)
    reference = journal.append(fact(0), ARRAYS)
    journal.sync()

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    journal.append(fact(1), ARRAYS)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(JournalError, match="No space left") as failure:
        journal.sync()
    assert failure.value.errno == errno.ENOSPC
    monkeypatch.undo()
    with pytest.raises(JournalError):
        journal.sync()
    with pytest.raises(JournalError):
        journal.append(fact(2), ARRAYS)
    assert journal.read(reference) == (fact(0), ARRAYS)
    journal.close()


def test_a_sync_in_the_thread_counts_when_it_is_finished(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        journal.append(fact(0), ARRAYS)
        journal.begin_sync()
        assert journal.syncing and journal.unsynced_bytes
        journal.append(fact(1), ARRAYS)
        journal.finish_sync()
        assert not journal.syncing and 0 < journal.unsynced_bytes < journal.end
    assert replayed(tmp_path) == [fact(0), fact(1)]


def test_a_failed_sync_in_the_thread_raises_when_it_is_finished(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append(fact(0), ARRAYS)
    monkeypatch.setattr(os, "fdatasync", lambda file: os.fsync(1_000_000))
    journal.begin_sync()
    with pytest.raises(JournalError, match="cannot be written"):
        journal.finish_sync()
    with pytest.raises(JournalError):
        journal.begin_sync()
    monkeypatch.undo()
    journal.close()
    assert replayed(tmp_path) == []


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    whole_write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, data, at: whole_write(file, [b"".join(data)[:30]], at))
    with closing(Journal(tmp_path)) as journal:
        for number in range(3):
            journal.append(fact(number), ARRAYS)
    assert replayed(tmp_path) == [fact(number) for number in range(3)]


def test_a_second_broker_on_the_same_journal_is_refused(tmp_path):
    first = Journal(tmp_path)
    with pytest.raises(JournalError, match="in use"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def no_descriptor(*arguments):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_journal_that_fails_to_open_leaves_no_descriptor_open(tmp_path, monkeypatch):
    fill(tmp_path, 35)
    real = os.open
    with monkeypatch.context() as short:
        short.setattr(os, "open", lambda path, *more: (real if path.name == "lock" else no_descriptor)(path, *more))
        with pytest.raises(OSError, match="Too many open files"):
            Journal(tmp_path)
    assert len(replayed(tmp_path)) == 35


# --- segments -------------------------------------------------------------------------------------------------


def fill(folder, count, records_per_segment=10):
    """Write `count` synced records; returns the starts of the journal files."""
    with closing(Journal(folder, file_records=records_per_segment)) as journal:
        starts = [0]
        for number in range(count):
            journal.append(fact(number), ARRAYS)
            journal.sync()
            if journal.file_full:
                starts.append(journal.rotate())
    return starts


def test_references_and_replay_reach_across_files(tmp_path):
    starts = fill(tmp_path, 35)
    assert len(starts) == 4
    assert replayed(tmp_path) == [fact(number) for number in range(35)]
    assert replayed(tmp_path, starts[2]) == [fact(number) for number in range(20, 35)]
    with closing(Journal(tmp_path)) as journal:
        references = [reference for _, reference in journal.replay()]
        order = random.Random(0).sample(range(35), 35)
        assert [journal.read(references[number])[0] for number in order] == [fact(number) for number in order]


def test_only_the_last_file_may_have_a_torn_tail(tmp_path):
    fill(tmp_path, 35)
    first, *_, last = sorted(tmp_path.glob("*.msgpack"))
    last.write_bytes(last.read_bytes()[:-1])
    assert len(replayed(tmp_path)) == 34
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match="damaged at position"):
        replayed(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    fill(tmp_path, 35)
    sorted(tmp_path.glob("*.msgpack"))[1].unlink()
    with pytest.raises(JournalError, match="lacks the file"):
        replayed(tmp_path)


def test_files_are_reclaimed_unless_they_hold_a_live_record(tmp_path):
    starts = fill(tmp_path, 45)
    with closing(Journal(tmp_path)) as journal:
        references = [reference for _, reference in journal.replay()]
        before = journal.bytes_on_disk
        live = {references[13][0], references[44][0]}
        dead = reclaimable_files(file_starts(tmp_path), starts[3], live)
        assert dead == [starts[0], starts[2]]
        paths = [file_path(tmp_path, start) for start in dead]
        for _ in range(2):
            journal.release_files(dead)
            assert journal.bytes_on_disk == before - sum(path.stat().st_size for path in paths)
        assert journal.read(references[13]) == (fact(13), ARRAYS)
        for path in paths:
            path.unlink()
    assert replayed(tmp_path, starts[3]) == [fact(number) for number in range(30, 45)]


def test_a_failure_during_a_write_leaves_nothing_unsynced_on_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append(fact(0), ARRAYS)
    journal.sync()
    synced, whole_write, writing = journal.end, os.pwritev, threading.Event()

    def slow_write(file, data, at):
        writing.set()
        time.sleep(0.2)
        return whole_write(file, data, at)

    monkeypatch.setattr(os, "pwritev", slow_write)
    journal.append(fact(0), ARRAYS)
    journal.begin_sync()
    assert writing.wait(60.0)
    journal.fail(OSError(errno.ENOSPC, "No space left on device"))
    journal.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.msgpack")) == synced


def large(number):
    """Arrays so large that their record is cached in memory, and written past the page cache."""
    data = random.Random(number).randbytes(4 * 20_000 + number % 3)
    return [(zlib.crc32(data), data)] * 2


def test_large_records_between_small_ones_come_back_as_they_were(tmp_path):
    """Records are read from memory, from disk, and after a truncation anywhere near the end of a record."""
    wanted = [(fact(number), large(number) if number % 5 else ARRAYS) for number in range(60)]
    ends = []
    with closing(Journal(tmp_path)) as journal:
        for number, (event, arrays) in enumerate(wanted):
            ends.append(sum(journal.append(event, arrays)))
            if number % 7 == 0:
                journal.sync()
    with closing(Journal(tmp_path)) as journal:
        references = [reference for _, reference in journal.replay()]
        assert [journal.read(reference) for reference in references] == wanted
        assert [journal.append(*wanted[1])[0]] == ends[-1:]
    (path,) = tmp_path.glob("*.msgpack")
    whole = path.read_bytes()
    for number in range(0, 60, 9):
        for length in (ends[number] - 1, ends[number], ends[number] + 1):
            path.write_bytes(whole[:length])
            assert len(replayed(tmp_path)) == sum(end <= length for end in ends)


def test_a_large_sync_bypasses_the_page_cache_and_a_small_one_does_not(tmp_path, monkeypatch):
    ways, real = [], journal_module.write_and_sync

    def watched(*arguments):
        ways.append(arguments[-1] is not None)
        return real(*arguments)

    monkeypatch.setattr(journal_module, "write_and_sync", watched)
    with closing(Journal(tmp_path)) as journal:
        for arrays in ([ARRAYS], [large(0)] * 2, [ARRAYS] * 3000):
            for record_arrays in arrays:
                journal.append(fact(0), record_arrays)
            journal.sync()
    assert ways == [False, True, False]


def test_the_cache_of_recent_large_records_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "CACHE_BYTES", 1 << 20)
    with closing(Journal(tmp_path)) as journal:
        references = [journal.append(fact(number), large(number)) for number in range(40)]
        journal.sync()
        monkeypatch.setattr(os, "pread", lambda *arguments: pytest.fail("the record should be in memory"))
        assert [journal.read(reference) for reference in references[-6:]] == [
            (fact(number), large(number)) for number in range(34, 40)
        ]
        monkeypatch.undo()
        assert journal.read(references[0]) == (fact(0), large(0))
        kept = journal._recent.records.values()
        assert len(kept) == 6 and sum(length for *_, length in kept) <= 1 << 20


WRITER = """
import sys, time
from pathlib import Path
from april.broker.journal.journal import Journal
from tests.broker.test_journal import ARRAYS, chunk, large

journal = Journal(Path(sys.argv[1]))
number = len(list(journal.replay()))
while True:
    for _ in range(1 + number % 4):
        journal.append(fact(number), large(number) if number % 5 else ARRAYS)
        number += 1
    journal.sync()
    print(number, flush=True)
"""


@pytest.mark.full
def test_everything_a_killed_process_had_synced_is_on_disk_by_either_way_of_writing(tmp_path):
    promised = 0
    for kill in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as writer:
            for line in itertools.islice(writer.stdout, 3 + 2 * kill):
                promised = int(line)
            writer.kill()
        with closing(Journal(tmp_path)) as journal:
            found = [journal.read(reference) for _, reference in journal.replay()]
        assert len(found) >= promised
        assert found == [(fact(number), large(number) if number % 5 else ARRAYS) for number in range(len(found))]
