"""Applied deltas of weights are the whole update, bit by bit, or they are not used. The learner writes them."""

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from april.config import Config
from april.learner.snapshot_writing import SnapshotWriting
from april.util import clock
from april.weights import deltas
from april.weights.deltas import apply_delta, delta_pieces, words
from april.weights.folders import CHAIN_FILE, SnapshotFolders, name_of
from april.weights.puller import SnapshotPuller
from april.weights.snapshot import ReusedBuffers, SnapshotError, pack, unpack
from april.wire.message import Version
from april.wire.training import WeightFolder
from tests.support.harmed_files import CANARY, HARMS, PATIENCE_S
from tests.support.run_processes import wait_until

DELTA_FILE = "model-0000-0000.delta"


@st.composite
def updates(draw):
    """A tensor's bits before and after an update, NaNs and negative zeros among them; None before: it is a new one."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    shape = draw(st.sampled_from([(), (0, 4), (1,), (7, 11), (300, 5)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = torch.empty(shape, dtype=dtype)
    words(before)[:] = rng.integers(0, 2 ** (8 * dtype.itemsize), before.numel())
    after, share = before.clone(), draw(st.sampled_from([0.0, 0.01, 0.3, 0.6, 1.0]))
    bits = words(after)
    bits[rng.random(bits.size) < share] ^= draw(st.sampled_from([1, 0x8001, 0xFFFF]))
    return draw(st.sampled_from([before, before, before, None, before.reshape(-1)])), after


@settings(max_examples=60, deadline=None)
@given(st.lists(updates(), max_size=4))
def test_an_applied_delta_is_the_whole_update_bit_by_bit(updates):
    base = {f"t{i}": before for i, (before, _) in enumerate(updates) if before is not None}
    held = {name: tensor.clone() for name, tensor in base.items()}
    new = {f"t{i}": after for i, (_, after) in enumerate(updates)}
    block_bytes, deltas.BLOCK_BYTES = deltas.BLOCK_BYTES, 64
    try:
        data = torch.frombuffer(
            bytearray(b"".join(delta_pieces(pack(Version(0, 1), new).heads, new, base))), dtype=torch.uint8
        )
        found = unpack(*apply_delta(data, base, ReusedBuffers()))
    finally:
        deltas.BLOCK_BYTES = block_bytes
    assert same(found, new) and same(base, held)


def same(found, expected):
    assert found.keys() == expected.keys()
    pairs = [(found[name], each) for name, each in expected.items()]
    return all(a.dtype == b.dtype and a.shape == b.shape and (words(a) == words(b)).all() for a, b in pairs)


@pytest.mark.parametrize("at", [0, 8, 20, -300, -1])
def test_a_delta_whose_bytes_are_changed_is_refused(at):
    old = {"w": torch.randn(2000).bfloat16()}
    new = {"w": (old["w"].float() * 1.004).bfloat16()}
    content = bytearray(b"".join(delta_pieces(pack(Version(0, 1), new).heads, new, old)))
    flipped = content.copy()
    flipped[at] ^= 4
    for harmed in (flipped, content[:-3], content[: len(content) // 2], content[:3]):
        with pytest.raises(SnapshotError):
            apply_delta(torch.frombuffer(harmed, dtype=torch.uint8), old, ReusedBuffers())


class Learner:
    """A learner of one rank that writes snapshots, every fourth of them whole."""

    def __init__(self, policy_folder, url, incarnation=0):
        sections = {"model": {"path": policy_folder}, "data": {"path": policy_folder}, "run": {"name": "run"}}
        keys = {"transport": "pull", "folder": str(url), "delta": "auto", "whole_every": 4, "transfer_deadline_s": 60.0}
        config = Config.model_validate(sections | {"weights": keys})
        self.told, self.incarnation, self.weights = [], incarnation, {}
        self.writing = SnapshotWriting(config, lambda folder: self.told.insert(0, folder))
        self.folders = SnapshotFolders.to_read(config)

    def write(self, *steps):
        """Write the weights of these steps; returns the snapshots of which workers are told."""
        for step in steps:
            version, generator = Version(self.incarnation, step), torch.Generator().manual_seed(step)
            weights = self.weights.get(version._replace(step=step - 1)) or {"w": torch.zeros(50, 20).bfloat16()}
            changed = weights["w"] + 0.1 * (torch.rand(50, 20, generator=generator) < 0.05)
            self.weights[version] = {"w": changed, "norm": torch.tensor(float(step))}
            self.writing.start_writing(pack(version, self.weights[version]), CANARY)
            assert self.writing.finish()["publish_bytes"] > 0
        return self.told[:2]

    def harm(self, how, step, name):
        """Damage a file of a snapshot; returns what mends it."""
        path = Path(self.folders.objects.url) / name_of(Version(self.incarnation, step)) / name
        whole = path.read_bytes()
        HARMS[how](path)
        return lambda: path.write_bytes(whole)


@pytest.fixture
def learner(one_rank, policy_folder, tmp_path):
    return Learner(policy_folder, tmp_path / "weights")


@pytest.fixture
def worker(learner, monkeypatch):
    """A worker that has read nothing yet."""
    monkeypatch.setattr("april.weights.puller.RETRY_S", 0.1)
    worker = SnapshotPuller(learner.folders, PATIENCE_S)
    yield worker
    worker.close()


def takes(worker, learner, step):
    """Whether the next weights that a worker takes are those of a step, bit by bit."""
    wait_until(lambda: worker.has_staged)
    staged = worker.take()
    version = Version(learner.incarnation, step)
    return (staged.version, staged.canary) == (version, CANARY) and same(staged.tensors, learner.weights[version])


def recorded(monkeypatch):
    """The snapshots that are read from now on."""
    read, reads = [], SnapshotFolders.read
    monkeypatch.setattr(
        SnapshotFolders, "read", lambda own, folder, *rest: read.append(folder) or reads(own, folder, *rest)
    )
    return read


def test_a_worker_that_follows_reads_deltas_and_one_that_joins_the_whole_snapshot_first(learner, worker, monkeypatch):
    worker.offer(learner.write(1))
    assert takes(worker, learner, 1)
    read = recorded(monkeypatch)
    for step in (2, 3, 4, 5, 6):  # the fifth is whole again
        worker.offer(learner.write(step))
        assert takes(worker, learner, step)
    assert [folder.version.step for folder in read] == [2, 3, 4, 5, 6]
    worker.forget()  # what a worker that joins knows
    assert takes(worker, learner, 6) and [folder.version.step for folder in read[5:]] == [5, 6]
    lengths = [len(learner.folders.chain(folder)) for folder in reversed(learner.told)]
    assert lengths == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("harm", "name", "step", "used"),
    [
        ("flipped", DELTA_FILE, 4, 3),
        ("missing", CHAIN_FILE, 4, 3),
        ("torn", DELTA_FILE, 3, 2),
        ("flipped", CHAIN_FILE, 3, 2),
        ("missing", DELTA_FILE, 2, 1),
    ],
)
def test_a_damaged_delta_is_refused_and_the_chain_before_it_used_until_it_is_whole(
    learner, worker, name, step, used, harm
):
    offered = learner.write(1, 2, 3, 4)
    mend = learner.harm(harm, step, name)
    worker.offer(offered)
    assert takes(worker, learner, used)
    version, why = worker.refused.get(timeout=PATIENCE_S)
    assert version == Version(0, 4) and f"{name_of(Version(0, step))}/{name}" in why
    mend()
    assert takes(worker, learner, 4)


def test_nothing_is_used_of_a_chain_whose_whole_snapshot_is_damaged(learner, worker):
    offered = learner.write(1, 2)
    learner.harm("flipped", 1, "model-0000-0000.safetensors")
    worker.offer(offered)
    worker.refused.get(timeout=PATIENCE_S)
    assert not worker.has_staged


def test_a_delta_is_applied_to_no_other_base(learner, worker, policy_folder, tmp_path):
    """A learner that is restarted from an older checkpoint while a delta is on its way gives the same steps other
    weights."""
    _, first = learner.write(1, 2)[0], learner.told[-1]
    worker.offer([first])
    assert takes(worker, learner, 1)
    again = Learner(policy_folder, tmp_path / "weights", incarnation=1)
    late = again.write(1, 2)
    held = learner.folders.read(first, ReusedBuffers(), PATIENCE_S)
    forged = replace(held, folder=WeightFolder(late[1].version, "0" * 64))  # the version, and not the checksum
    for base in (None, held, forged):
        with pytest.raises(SnapshotError, match=r"delta to 1\.1"):
            again.folders.read(late[0], ReusedBuffers(), PATIENCE_S, base)
    worker.offer([late[0], learner.told[0]])
    assert takes(worker, again, 2)


def test_a_base_that_has_changed_in_memory_is_read_again(learner, worker):
    worker.offer(learner.write(1, 2))
    wait_until(lambda: worker.has_staged)
    worker.take().tensors["w"][0, 0] += 1.0
    worker.offer(learner.write(3))
    assert "tensor w is not the learner's" in worker.refused.get(timeout=PATIENCE_S)[1]
    assert takes(worker, learner, 3)


def test_a_chain_that_ends_in_a_wrong_delta_is_read_again_once(learner, worker, monkeypatch):
    """The learner's own base has changed in memory before it wrote the fourth."""
    worker.offer(learner.write(1, 2, 3))
    assert takes(worker, learner, 3)
    read = recorded(monkeypatch)
    learner.writing._base.data[0] ^= 4
    worker.offer(learner.write(4))
    for _ in range(4):
        worker.refused.get(timeout=PATIENCE_S)
    assert [folder.version.step for folder in read[:8]] == [4, 1, 2, 3, 4, 4, 4]
    worker.offer(learner.write(5))
    assert takes(worker, learner, 5)


def test_the_snapshots_that_a_delta_rests_on_are_kept(learner, monkeypatch):
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    kept = []
    for step in range(1, 8):
        learner.write(step)
        kept.append(sorted({int(name[5:11]) for name in learner.folders.objects.names()}))
        now += 241.0  # a deadline for each of four links
    told_of_fourth_and_fifth, of_fifth_and_sixth = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]  # superseded just now
    assert kept[4:] == [told_of_fourth_and_fifth, of_fifth_and_sixth, [5, 6, 7]]
