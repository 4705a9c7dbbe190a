"""Deltas over weight channels: what a worker makes of one is the whole update, bit by bit, or it gets the whole update.
Real gloo, real shared memory, a real kill."""

import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from april.config import WeightsSection
from april.weights import part_transfer
from april.weights.channel import Adapter
from april.weights.deltas import delta_pieces
from april.weights.part_transfer import DeltaBases, KeptWeights, PartDelta, prepare_delta
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.weights.snapshot import pack
from april.wire.message import Version
from tests.support.channel_workers import PATIENCE_S, ChannelWorker, take
from tests.support.run_processes import wait_until

SECTION = WeightsSection(delta="auto", transfer_deadline_s=PATIENCE_S)
SIZE = 300_000


def weights(step, incarnation=0):
    """Weights of which each step has changed one value in a hundred; what the steps change depends on the
    incarnation."""
    moved = torch.zeros(SIZE)
    for each in range(1, step + 1):
        moved += torch.rand(SIZE, generator=torch.Generator().manual_seed(1000 * incarnation + each)) < 0.01
    return {"w": (1.0 + moved / 128).bfloat16(), "norm": torch.full((3,), float(step)), "empty": torch.zeros(0)}


class Learner(WeightPublisher):
    """A publisher that waits for no worker. `forms`: of each transfer its step, and the bytes of the delta or, if it
    was whole, None."""

    def __init__(self, transport, incarnation=0):
        super().__init__(SECTION.model_copy(update={"transport": transport, "publish_deadline_s": 0.0}), "test", "cpu")
        self.incarnation, self.forms = incarnation, []

    def offer(self, step):
        self.publish(Version(self.incarnation, step), weights(step, self.incarnation))

    def await_held(self, *steps):
        """Wait until the workers have said that they hold these steps."""
        expected = Counter(Version(self.incarnation, step) for step in steps)
        wait_until(lambda: Counter(each.acknowledged for each in list(self._channels.values())) == expected)

    def _transfer(self, channel, link, snapshot, forwards):
        super()._transfer(channel, link, snapshot, forwards)
        size = len(snapshot.delta.encoded(snapshot)) if channel.was_delta else None
        self.forms.append((snapshot.version.step, size))


@pytest.fixture(params=["collective", "shared_memory"])
def transport(request):
    return request.param


collective = pytest.mark.parametrize("transport", ["collective"])


@pytest.fixture
def start(transport, monkeypatch):
    """start(incarnation): a learner."""
    monkeypatch.setattr("april.weights.publisher.SILENCE_S", PATIENCE_S)
    made = []

    def start(incarnation=0):
        made.append(Learner(transport, incarnation))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def learner(start):
    return start()


@pytest.fixture
def join():
    """join(learner, name): a worker, whose engine takes weights when `loads` is called."""
    made = []

    def join(learner, name="w0", delta="auto"):
        made.append(WeightReceiver(learner.config.model_copy(update={"delta": delta}), f"{name}-uid", name, "cpu"))
        made[-1].connect(learner.address)
        return made[-1]

    yield join
    for each in made:
        each.close()


def loads(worker, step, incarnation=0):
    """Have the engine take the next weights, which have to be those of the step, bit by bit."""
    staged = take(worker)
    assert staged.version == Version(incarnation, step)
    assert_bits(staged.tensors, weights(step, incarnation))
    worker.loaded(staged.version)


def assert_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype and found[name].shape == each.shape
        assert torch.equal(found[name].contiguous().view(torch.uint8), each.view(torch.uint8))


def test_a_worker_gets_what_has_changed_since_the_version_that_it_holds_and_others_get_all(learner, join):
    learner.offer(0)
    first, late, plain = join(learner, "w0"), join(learner, "w1"), join(learner, "w2", delta="off")
    for each in (first, late, plain):
        loads(each, 0)
    learner.await_held(0, 0, 0)
    for step in (1, 2):
        learner.offer(step)
        loads(first, step), loads(plain, step)
        learner.await_held(0, step, step)
        wait_until(lambda: late.has_staged)
    learner.offer(3)
    loads(late, 1), loads(late, 3)
    joined = join(learner, "w3")
    for each in (first, plain, joined):
        loads(each, 3)
    learner.await_held(3, 3, 3, 3)
    learner.offer(4)
    for each in (first, late, plain, joined):
        loads(each, 4)
    learner.await_held(4, 4, 4, 4)
    whole = [sorted(size is None for at, size in learner.forms if at == step) for step in range(5)]
    deltas_but_to_plain = [False, False, True]
    assert whole == [
        [True] * 3,
        deltas_but_to_plain,
        [False, True],
        [False, True, True, True],
        [False, *deltas_but_to_plain],
    ]
    assert max(size for _, size in learner.forms if size) < 0.05 * 2 * SIZE


@collective
def test_a_worker_whose_base_is_not_what_it_says_refuses_the_delta_and_gets_all(learner, join, caplog):
    """Its base has changed in memory; later another version is kept under the name of the one that it holds, then none.
    After the first failure it asks for one more whole version, after the second in a row for two."""
    worker = join(learner)

    def deliver(*steps):
        for step in steps:
            learner.offer(step)
            loads(worker, step)
            learner.await_held(step)

    deliver(0)
    worker.kept.tensors["w"][7] += 1.0
    deliver(1, 2)
    assert "the weights are not the learner's once their delta is applied" in caplog.text
    worker.kept = KeptWeights(worker.kept.name, weights(0))
    deliver(3, 4, 5)
    assert "it and 2 versions after it come whole" in caplog.text
    worker.kept = None
    deliver(6)
    assert "a delta to 0.5 is announced, which this worker does not keep" in caplog.text
    deliver(7)
    assert [step for step, size in learner.forms if size] == [7] and len(learner.forms) == 8


@collective
def test_computing_a_delta_takes_no_time_from_a_transfer(learner, join, monkeypatch):
    """It takes longer than a transfer may; meanwhile the worker has not been told of the version."""
    learner.offer(0)
    worker = join(learner)
    loads(worker, 0)
    learner.await_held(0)
    encoded = PartDelta.encoded
    monkeypatch.setattr(learner, "config", learner.config.model_copy(update={"transfer_deadline_s": 1.0}))
    monkeypatch.setattr(worker, "config", worker.config.model_copy(update={"transfer_deadline_s": 1.0}))

    def slow(delta, part):
        if delta._old:
            time.sleep(1.2)
        return encoded(delta, part)

    monkeypatch.setattr(PartDelta, "encoded", slow)
    learner.offer(1)
    loads(worker, 1)
    learner.await_held(1)
    assert [size is None for _, size in learner.forms] == [True, False]


@collective
def test_an_engine_may_take_tensors_out_of_what_it_loads(learner, join):
    learner.offer(0)
    worker = join(learner)
    for step in (0, 1):
        staged = take(worker)
        staged.tensors.clear()
        worker.loaded(staged.version)
        learner.await_held(step)
        learner.offer(step + 1)
    loads(worker, 2)
    learner.await_held(2)
    assert [size is None for _, size in learner.forms] == [True, False, False]


@collective
@pytest.mark.parametrize("holds", [True, False])
def test_a_delta_is_applied_in_place_unless_somebody_still_uses_its_base(learner, join, holds):
    learner.offer(0)
    worker = join(learner)
    staged = take(worker)
    held = staged.tensors if holds else {}
    worker.loaded(staged.version)
    del staged
    learner.await_held(0)
    before = worker.kept.tensors["w"].data_ptr()
    learner.offer(1)
    loads(worker, 1)
    assert (worker.kept.tensors["w"].data_ptr() == before) == (not holds)
    assert_bits(held, weights(0) if holds else {})


@collective
@pytest.mark.parametrize("delta", ["off", "auto"])
def test_a_learner_keeps_no_base_that_nobody_needs(learner, join, delta):
    """No version but the last is alive where no worker takes deltas, nor once a delta is computed."""
    worker, alive = join(learner, delta=delta), []
    for step in (0, 1, 2):
        learner.offer(step)
        alive.append(weakref.ref(learner._snapshot.data))
        loads(worker, step)
        learner.await_held(step)
    wait_until(lambda: [each() is None for each in alive] == [True, True, False])


def test_a_base_that_nobody_has_needed_is_dropped_before_the_next_version_is_packed():
    bases = DeltaBases("auto")
    old = pack(Version(0, 0), weights(0))
    bases.followed_by(old)
    part, alive = bases.followed_by(pack(Version(0, 1), weights(1))), weakref.ref(old.data)
    del old
    assert alive() is not None
    bases.release()
    assert alive() is None and not len(prepare_delta(part))


@collective
def test_a_delta_that_is_longer_than_its_part_is_sent_whole(learner, join, monkeypatch):
    """As of many tiny tensors."""
    monkeypatch.setattr("tests.weights.test_channel_deltas.SIZE", 20)
    learner.offer(0)
    worker = join(learner)
    for step in (0, 1, 2):
        learner.offer(step)
        loads(worker, step)
        learner.await_held(step)
    assert learner.forms[1:] == [(1, 0), (2, 0)]
    size = learner._snapshot.data.numel()
    assert [each.sent_bytes for each in learner._channels.values()] == [size]


@collective
def test_merged_weights_are_not_kept(learner, join):
    """No delta follows them: the next version is an adapter again."""
    worker = join(learner)
    merged = pack(Version(0, 0), weights(0))
    learner._merged.form_for = lambda *given, **how: merged
    learner._offer(replace(merged, adapter=Adapter("base", 1.0, "bfloat16")))
    loads(worker, 0)
    learner.await_held(0)
    assert worker.kept is None


@collective
@pytest.mark.parametrize(
    ("tampered", "checked"),
    [("length", "delta"), *product(["bytes", "another delta", "other tensors"], ["delta", "result"])],
)
def test_a_delta_that_was_changed_on_its_way_is_refused_and_all_are_sent(
    learner, join, monkeypatch, caplog, tampered, checked
):
    """Also one that is whole in itself: links are not encrypted, so only the manifest is believed. It has the SHA-256
    of rank 0's delta, and of what comes out of those of other ranks."""
    learner.offer(0)
    worker = join(learner)
    loads(worker, 0)
    learner.await_held(0)
    encoded, new, described = PartDelta.encoded, weights(1), part_transfer.as_sent

    def changed(delta, part):
        content = encoded(delta, part)
        if tampered == "bytes":
            content = content.clone()
            content[-9] ^= 1
        elif tampered == "length":
            content = torch.cat([content, torch.zeros(2 * part.data.numel() + 2**20, dtype=torch.uint8)])
        else:
            heads = part.heads[:1] if tampered == "other tensors" else part.heads
            pieces = delta_pieces(heads, {**new, "w": new["w"] * 2}, weights(0))
            content = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
        return content

    monkeypatch.setattr(PartDelta, "encoded", changed)
    if checked == "result":
        monkeypatch.setattr("april.weights.publisher.as_sent", lambda snapshot, _: described(snapshot, False))
    learner.offer(1)
    loads(worker, 1)
    learner.await_held(1)
    said = {"length": "bytes is announced for"}
    if checked == "result":
        said |= {"bytes": "", "other tensors": "other tensors than were announced"}
    assert "channel to the learner failed" in caplog.text
    assert said.get(tampered, "differ from those that were sent") in caplog.text
    assert learner.forms == [(0, None), (1, None)]


@collective
def test_a_learner_that_is_restarted_from_an_older_checkpoint_sends_all(start, join, monkeypatch):
    """While a delta of the learner before is on its way, which arrives no more."""
    before, after = start(), start(incarnation=1)
    for step in (0, 1):
        before.offer(step)
        if not step:
            worker = join(before)
        loads(worker, step)
        before.await_held(step)
    reached, ends = threading.Event(), threading.Event()

    def cut_off(*part, **how):
        reached.set()
        ends.wait(PATIENCE_S)
        raise ConnectionError("the learner is gone")

    monkeypatch.setattr("april.weights.publisher.send_part", cut_off)
    before.offer(2)
    assert reached.wait(PATIENCE_S)
    monkeypatch.undo()
    before.close(0.0)
    ends.set()
    after.offer(1)
    worker.connect(after.address)
    loads(worker, 1, incarnation=1)
    after.await_held(1)
    after.offer(2)
    loads(worker, 2, incarnation=1)
    after.await_held(2)
    assert after.forms[0] == (1, None) and after.forms[1][1]


@collective
def test_an_engine_killed_in_the_middle_of_a_delta_costs_its_own_channel(learner, join, transport, monkeypatch):
    learner.bucket_bytes = 2**10
    other = join(learner)
    victim = ChannelWorker(learner.address, transport, "w1", "--delta")
    assert victim.has_started()
    for step in (0, 1):
        learner.offer(step)
        loads(other, step)
        victim.await_version(Version(0, step))
        learner.await_held(step, step)
    divided = part_transfer.buckets

    def killed_after_the_first(data, size):
        """To the victim the rest is sent again until gloo, which takes some for a dead process, says that it is
        gone."""
        first, *rest = divided(data, size)
        yield first
        if "-w1-" in threading.current_thread().name:
            victim.end()
            rest = cycle(rest)
        yield from rest

    monkeypatch.setattr(part_transfer, "buckets", killed_after_the_first)
    learner.offer(2)
    loads(other, 2)
    learner.await_held(2)
    sizes = [size for _, size in learner.forms]
    assert sizes[:2] == [None, None] and min(sizes[2:]) > learner.bucket_bytes and len(sizes) == 5
