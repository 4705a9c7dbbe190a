"""Direct I/O writes the same bytes as writes through the page cache."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.util import files

NEAR_BLOCKS = st.integers(0, 3).flatmap(lambda n: st.integers(-3, 3).map(lambda d: max(0, n * files.BLOCK_BYTES + d)))
BATCHES = st.lists(st.lists(NEAR_BLOCKS, min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.fixture
def uncached(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "STAGE_BYTES", 2 * files.BLOCK_BYTES)
    (tmp_path / "file").touch()
    writer = files.open_uncached(tmp_path / "file")
    assert writer, "the file system of the tests can do it"
    yield writer
    writer.close()


def append(path, batches: list[list[int]], uncached) -> bytes:
    """Append and sync batches of pieces of these lengths; returns the bytes that the file should have."""
    whole, file = b"", os.open(path, os.O_RDWR | os.O_TRUNC)
    for number, lengths in enumerate(batches):
        pieces = [os.urandom(length) for length in lengths]
        files.write_and_sync(file, pieces, len(whole), uncached=uncached if number % 2 == 0 else None)
        whole += b"".join(pieces)
    os.close(file)
    return whole


@settings(max_examples=40, deadline=None)
@given(batches=BATCHES)
def test_a_file_is_the_same_written_through_the_cache_or_past_it(batches, tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "file"
    path.touch()
    writer = files.open_uncached(path)
    assert path.read_bytes() == b"" and append(path, batches, writer) == path.read_bytes()
    writer.close()


def test_writes_are_synced_before_the_call_returns(tmp_path, uncached, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.fstat(file).st_size))
    append(tmp_path / "file", [[files.BLOCK_BYTES], [100, 7]], uncached)
    assert synced == [files.BLOCK_BYTES, files.BLOCK_BYTES + 107]


def test_more_than_the_stage_holds_goes_in_several_writes(tmp_path, uncached):
    lengths = [5 * files.BLOCK_BYTES + 17, 1, 3 * files.BLOCK_BYTES]
    assert append(tmp_path / "file", [lengths, lengths, lengths], uncached) == (tmp_path / "file").read_bytes()


def test_blocks_that_direct_io_does_not_write_go_through_the_cache(tmp_path, uncached, monkeypatch):
    """Direct I/O may write some of the blocks, or none if the file system needs another alignment."""
    real, answers = os.pwritev, iter([512, errno.EINVAL])

    def reluctant(file, buffers, offset):
        if file != uncached._direct:
            return real(file, buffers, offset)
        answer = next(answers)
        if answer == errno.EINVAL:
            raise OSError(answer, os.strerror(answer))
        return real(file, [buffers[0][:answer]], offset)

    monkeypatch.setattr(os, "pwritev", reluctant)
    lengths = [2 * files.BLOCK_BYTES]
    assert append(tmp_path / "file", [lengths, [], lengths], uncached) == (tmp_path / "file").read_bytes()
    assert next(answers, None) is None, "both were asked for"


def test_a_full_disk_raises_its_error(tmp_path, uncached, monkeypatch):
    def full(file, buffers, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        append(tmp_path / "file", [[files.BLOCK_BYTES]], uncached)


def test_without_direct_io_there_is_no_uncached_writer(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    (tmp_path / "file").touch()
    assert files.open_uncached(tmp_path / "file") is None
