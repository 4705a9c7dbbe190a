"""Weights that learner and worker hand over within an accelerator that they share. The accelerator's memory is the
host's here, shared by a file descriptor in place of a CUDA handle: what CUDA does has not been tried."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from april.config import ConfigError, WeightsSection
from april.util import clock
from april.weights import channel
from april.weights.channel import ChannelInvite
from april.weights.cuda_ipc import SLOT_BYTES, SLOTS, CudaIpcTransport
from april.weights.publisher import WeightPublisher
from april.weights.snapshot import device_checksum
from april.weights.transports import OtherMachine
from april.wire.message import Version
from tests.support.channel_workers import PATIENCE_S, ChannelWorker, total, weights
from tests.support.host_ring import HostRingTransport
from tests.support.run_processes import wait_until

NAME = f"{HostRingTransport.__module__}:{HostRingTransport.__qualname__}"


@pytest.fixture
def publisher():
    section = WeightsSection(transport=NAME, publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)
    publisher = WeightPublisher(section, "test", "cpu")
    yield publisher
    publisher.close()


def test_buckets_of_any_size_go_through_the_ring_transfer_after_transfer():
    store, transport = channel.serve_store("127.0.0.1"), HostRingTransport(WeightsSection())
    invite = ChannelInvite("any-size", "gloo", "127.0.0.1", store.port, PATIENCE_S)
    with ThreadPoolExecutor(2) as sides:
        learner, worker = sides.map(lambda as_learner: transport.meet(invite, as_learner), (True, False))
        for size in (0, 1, SLOT_BYTES, (SLOTS + 1) * SLOT_BYTES + 17):
            sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
            got = torch.zeros_like(sent)
            sending = sides.submit(learner.send, sent.split(3 * SLOT_BYTES // 2), clock.now() + PATIENCE_S)
            worker.receive(got.split(3 * SLOT_BYTES // 2), clock.now() + PATIENCE_S)
            sending.result()
            assert torch.equal(sent, got)
    worker.close()
    learner.close()


@pytest.mark.full
def test_the_ring_of_a_killed_worker_carries_the_weights_of_the_next_one(publisher):
    """torch never frees memory of an accelerator that a killed process had opened, so a new ring for each would fill
    it."""
    for step, name in enumerate(("first", "second")):
        worker = ChannelWorker(publisher.address, NAME, name)
        assert worker.has_started()
        publisher.publish(Version(0, step), weights(step))
        assert worker.await_version(Version(0, step)) == total(step)
        assert publisher._transport._rings == [], "the only one is in use"
        worker.end()
        wait_until(lambda: publisher._transport._rings)


def test_a_worker_on_another_accelerator_or_with_another_transport_is_refused():
    worker = HostRingTransport(WeightsSection(transport="cuda_ipc"))
    content = msgspec.msgpack.encode(("GPU-elsewhere", [b"handle", 1, 0, b"counter", 0, b"event", True]))
    with pytest.raises(OtherMachine, match=r"weights\.transport = 'cuda_ipc' .*accelerator"):
        CudaIpcTransport.open_handle(worker, content, [])
    with pytest.raises(OtherMachine, match=r"weights\.transport = 'cuda_ipc' .*same"):
        CudaIpcTransport.open_handle(worker, b".", [])


def test_a_machine_without_accelerators_is_refused_with_the_key_and_what_to_set(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'weights\.transport' = 'cuda_ipc' .*'shared_memory'"):
        CudaIpcTransport(WeightsSection(transport="cuda_ipc"))


def test_a_checksum_changes_with_each_byte_and_with_the_places_of_words():
    data = torch.randint(2, 255, (4099,), dtype=torch.uint8)  # a last byte of 0 is as none
    swapped = torch.cat([data[8:16], data[:8], data[16:]])
    flipped = [data.clone() for _ in range(100)]
    for each, place in zip(flipped, torch.randperm(len(data)), strict=False):
        each[place] ^= 1
    assert device_checksum(data) == device_checksum(data.clone())
    assert len({device_checksum(each) for each in (data, swapped, data[:-1], *flipped)}) == 103
