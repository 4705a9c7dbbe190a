"""A snapshot unpacks to the tensors that were packed, or is refused."""

import pytest
import torch

from april.version import Version
from april.weights.snapshot import SnapshotError, buckets, pack, unpack
from april.wire import TensorHead

TENSORS = {
    "odd": torch.arange(7, dtype=torch.float32),
    "half": torch.ones(3, 5, dtype=torch.bfloat16) / 3,
    "scalar": torch.tensor(2.5),
    "view": torch.arange(12.0).reshape(3, 4).T,
    "empty": torch.zeros(0, 4),
}


def test_unpack_inverts_pack():
    snapshot = pack(Version(0, 3), TENSORS)
    unpacked = unpack(snapshot.heads, snapshot.data, snapshot.checksum)
    assert list(unpacked) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert unpacked[name].dtype == tensor.dtype and torch.equal(unpacked[name], tensor)


def test_a_packed_version_does_not_change_with_the_weights_it_was_packed_from():
    weights = {"w": torch.zeros(4)}
    snapshot = pack(Version(0, 0), weights)
    weights["w"] += 1
    assert unpack(snapshot.heads, snapshot.data, snapshot.checksum)["w"].sum() == 0


def test_damage_is_found():
    snapshot = pack(Version(0, 0), TENSORS)
    snapshot.data[5] += 1
    with pytest.raises(SnapshotError, match="differ"):
        unpack(snapshot.heads, snapshot.data, snapshot.checksum)


def test_a_type_that_is_not_of_weights_is_refused():
    data = pack(Version(0, 0), TENSORS)
    with pytest.raises(SnapshotError, match="float64"):
        unpack([TensorHead("x", "float64", [1])], data.data, data.checksum)


def test_buckets_cover_the_data_in_order():
    data = torch.arange(100, dtype=torch.uint8)
    pieces = buckets(data, 32)
    assert max(len(piece) for piece in pieces) <= 32 and torch.equal(torch.cat(pieces), data)
