"""A snapshot unpacks to the tensors that were packed, or is refused."""

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from april.weights.channel import TensorHead
from april.weights.snapshot import (
    DIGEST_BLOCK_BYTES,
    SPARE_BYTES,
    ArrivingDigest,
    ReusedBuffers,
    SnapshotError,
    buckets,
    digest,
    joined,
    on_threads,
    pack,
    server_buckets,
    unpack,
    verify,
)
from april.wire.message import Version

TENSORS = {
    "odd": torch.arange(7, dtype=torch.float32), "half": torch.ones(3, 5, dtype=torch.bfloat16) / 3,
    "scalar": torch.tensor(2.5), "view": torch.arange(12.0).reshape(3, 4).T, "empty": torch.zeros(0, 4),
}  # fmt: skip


def test_unpack_inverts_pack():
    snapshot = pack(Version(0, 3), TENSORS)
    unpacked = unpack(snapshot.heads, snapshot.data)
    assert list(unpacked) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert unpacked[name].dtype == tensor.dtype and torch.equal(unpacked[name], tensor)


def test_a_packed_version_does_not_change_with_the_weights_it_was_packed_from():
    weights = {"w": torch.zeros(4)}
    snapshot = pack(Version(0, 0), weights)
    weights["w"] += 1
    assert unpack(snapshot.heads, snapshot.data)["w"].sum() == 0


def test_damaged_weights_are_refused():
    snapshot = pack(Version(0, 0), TENSORS)
    announced = snapshot.digest
    snapshot.data[5] += 1
    with pytest.raises(SnapshotError, match="differ"):
        verify(snapshot.data, announced)
    snapshot.data[5] -= 1
    verify(snapshot.data, announced)


def test_blocks_that_change_places_change_the_digest():
    data = torch.arange(3 * DIGEST_BLOCK_BYTES // 8).view(torch.uint8)
    first, *others = data.split(DIGEST_BLOCK_BYTES)
    assert len({digest(data), digest(torch.cat([*others, first])), digest(first), digest(first[:0])}) == 4


def test_the_digest_of_what_arrives_in_buckets_is_that_of_the_whole():
    data = torch.arange(3 * DIGEST_BLOCK_BYTES // 8 + 1).view(torch.uint8)
    with on_threads() as submit:
        arriving = ArrivingDigest(data, submit)
        for bucket in data.split(2**20 + 1):
            arriving.add(bucket)
        assert arriving.result() == digest(data)


def test_a_dtype_that_weights_cannot_have_is_refused():
    data = pack(Version(0, 0), TENSORS)
    with pytest.raises(SnapshotError, match="float64"):
        unpack([TensorHead("x", "float64", [1])], data.data)


def test_buckets_cover_the_data_in_order():
    data = torch.arange(100, dtype=torch.uint8)
    pieces = buckets(data, 32)
    assert max(len(piece) for piece in pieces) <= 32 and torch.equal(torch.cat(pieces), data)


def test_a_server_s_broadcasts_hold_whole_tensors_of_one_dtype_without_padding():
    tensors = {
        "a": torch.arange(3, dtype=torch.float32),
        "b": torch.arange(2, dtype=torch.float32),
        "c": torch.arange(5, dtype=torch.bfloat16),
        "larger than a bucket": torch.arange(40, dtype=torch.bfloat16),
        "d": torch.arange(7, dtype=torch.bfloat16),
    }
    snapshot = pack(Version(0, 0), tensors)
    parts = server_buckets(snapshot.heads, bucket_bytes=24)
    assert [[head.name for head in part] for part in parts] == [["a", "b"], ["c"], ["larger than a bucket"], ["d"]]
    for part in parts:
        expected = torch.cat([tensors[head.name].view(torch.uint8) for head in part])
        assert torch.equal(joined(snapshot, part), expected)


class Runtime:
    """Calls of a CUDA runtime: sizes of the memory that was page-locked, by its address."""

    def __init__(self):
        self.locked, self.refuses = {}, False

    def cudaHostRegister(self, address, size, flags):
        self.locked |= {} if self.refuses else {address: size}
        return 801 if self.refuses else 0

    def cudaHostUnregister(self, address):
        del self.locked[address]


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_page_locked_memory_is_used_again_only_once_no_tensor_lies_in_it(runtime):
    taken, snapshot = ReusedBuffers(), pack(Version(0, 0), TENSORS)
    size = snapshot.data.numel()
    first = taken.take(size).copy_(snapshot.data)
    address, held = first.data_ptr(), unpack(snapshot.heads, first)["view"]
    del first
    assert taken.take(size).fill_(0).data_ptr() != address and torch.equal(held, TENSORS["view"])
    del held
    addresses = {taken.take(size).data_ptr() for _ in range(3)}
    assert addresses == runtime.locked.keys() and list(runtime.locked.values()) == [size, size]


def test_whole_snapshots_and_deltas_share_page_locked_memory_and_what_fits_neither_is_freed(runtime):
    taken = ReusedBuffers()
    for _ in range(3):
        for size in (5000, 4900, 4900):  # a header is in whole files alone
            taken.take(size)
    assert list(runtime.locked.values()) == [5000]
    taken.take(2 * SPARE_BYTES)
    gc.collect()
    assert list(runtime.locked.values()) == [2 * SPARE_BYTES]


def test_threads_never_get_the_same_memory(runtime):
    taken, both = ReusedBuffers(), threading.Barrier(2)
    memory = np.empty(5, np.uint8)

    def is_free():
        """Without a tensor in it, as two threads would see before either takes it."""
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    taken._buffers = [(memory, is_free)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(taken.take, [5, 5])
    assert first.data_ptr() != second.data_ptr()


def test_memory_is_no_longer_page_locked_when_it_is_freed(runtime):
    taken = ReusedBuffers()
    data = taken.take(5)
    del taken
    assert data.data_ptr() in runtime.locked
    del data
    assert not runtime.locked


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(runtime):
    runtime.refuses = True
    assert ReusedBuffers().take(5).fill_(1).sum() == 5


def test_memory_is_kept_where_there_is_no_accelerator_only_if_it_is_to_stay():
    taken, staying = ReusedBuffers(), ReusedBuffers(stay=True)
    assert taken.take(5).shape == taken.take(5).shape == (5,) and not taken._buffers
    assert len({staying.take(5).data_ptr() for _ in range(3)}) == 1
