"""Workers of a chain forward what they receive: the learner sends one copy for each chain, all hold the same bytes, and
who is lost costs the others nothing. Real processes, real gloo, real shared memory."""

import signal

import pytest
import torch

from april.config import WeightsSection
from april.weights.chains import chain_from, forwarded_bytes
from april.weights.channel import WeightPart
from april.weights.publisher import WeightPublisher
from april.wire.message import Version
from tests.support.channel_workers import ChannelWorker
from tests.support.run_processes import wait_until

SECTION = WeightsSection(channel_size=3, publish_deadline_s=30.0)
SIZE = 200_000


def weights(step):
    return {"w": torch.full((SIZE,), float(step)), "empty": torch.zeros(0)}


@pytest.fixture(params=["collective", "shared_memory"])
def publisher(request):
    publisher = WeightPublisher(SECTION.model_copy(update={"transport": request.param}), "test", "cpu")
    yield publisher
    publisher.close()


@pytest.fixture
def join(publisher):
    """join(names): workers that have met, as far as chains of three allow."""
    workers = {}

    def join(*names):
        workers.update((name, ChannelWorker(publisher.address, publisher.config.transport, name)) for name in names)
        assert all(workers[name].has_started() for name in names)
        linked = len(workers) - -(-len(workers) // SECTION.channel_size)
        wait_until(lambda: sum(each.state == "ready" for each in channels(publisher).values()) == len(workers))
        wait_until(lambda: sum(each.is_linked for each in channels(publisher).values()) >= linked)
        heads = [each for each in channels(publisher).values() if each.upstream is None]
        assert max(len(list(chain_from(head))) for head in heads) <= SECTION.channel_size
        return workers

    yield join
    for each in workers.values():
        each.end()


def channels(publisher):
    return {channel.worker: channel for channel in list(publisher._channels.values())}


def test_a_learner_sends_one_copy_for_each_chain_and_all_workers_hold_it(publisher, join):
    workers = join(*"abcd")
    figures = publisher.publish(Version(0, 1), weights(1))
    assert figures["publish_workers"] == 4 and figures["publish_sent_bytes"] == 2 * figures["publish_bytes"]
    assert [worker.await_version(Version(0, 1)) for worker in workers.values()] == [SIZE] * 4


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("place", [0, 1], ids=["the first", "the second"])
def test_who_is_lost_costs_the_workers_behind_it_a_new_channel_at_most(publisher, join, place, number):
    workers = join(*"abc")
    first = next(name for name, each in channels(publisher).items() if each.upstream is None)
    second = channels(publisher)[first].downstream.worker
    lost = workers.pop((first, second)[place])
    lost.process.send_signal(number)
    publisher.publish(Version(0, 2), weights(2))
    assert [worker.await_version(Version(0, 2)) for worker in workers.values()] == [2.0 * SIZE] * 2
    lost.end()


def test_a_worker_that_comes_later_or_is_behind_gets_the_version_from_the_learner(publisher, join):
    workers = join(*"ab")
    publisher.publish(Version(0, 3), weights(3))
    workers |= join("c")
    assert workers["c"].await_version(Version(0, 3)) == 3 * SIZE


def test_the_last_worker_of_a_chain_is_a_small_share_of_the_largest_part_behind_the_first():
    """One worker, and a large part, have the buckets of the configuration."""
    for workers in (2, 8, 64):
        parts = [WeightPart([], size, "") for size in (2**20, 2**31)]
        assert workers * forwarded_bytes(parts, 2**24, workers) <= 2**31 // 16
        assert forwarded_bytes([WeightPart([], 2**40, "")], 2**24, workers) == 2**24
    assert forwarded_bytes(parts, 2**24, 1) == 2**24
    assert forwarded_bytes(parts[:1], 2**10, 8) == 2**10
