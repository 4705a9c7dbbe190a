"""Externally loaded weights: engines stop first, and resume under the new version once the trainer confirms."""

import asyncio
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from april.config import ConfigError, WeightsSection, load
from april.trainers.rollouts import aio
from april.trainers.rollouts.run import Rollouts
from april.util import clock
from april.weights.canary import Canary
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.message import Version
from tests.support.recording_broker import RecordingBroker

V0, V1 = Version(0, 0), Version(0, 1)
CANARY = Canary([1, 2, 3], [-1.0, -2.0], "float32")
EXTERNAL = ["--weights.transport", "external", "--worker.engine", "sglang", "--engine.url", "http://127.0.0.1:1"]
PATIENCE_S = 60.0


@pytest.fixture
def make():
    """make(**keys) -> (publisher, function name -> receiver)"""
    opened = []

    def publisher(**keys):
        section = WeightsSection(transport="external", **keys)
        weight_publisher = WeightPublisher(section, "test", "cpu")
        opened.append(weight_publisher)

        def receiver(name):
            opened.append(WeightReceiver(section, f"uid-{name}", name, "cpu"))
            opened[-1].connect(weight_publisher.address)
            return opened[-1]

        return weight_publisher, receiver

    yield publisher
    for each in reversed(opened):
        each.close()


def in_thread(work, *arguments):
    done = Future()

    def run():
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def until(condition):
    """The first true value of `condition()`."""
    deadline = clock.now() + PATIENCE_S
    while not (found := condition()):
        assert clock.now() < deadline
        time.sleep(0.01)
    return found


def joined(publisher, count=1):
    return until(lambda: sum(channel.state == "ready" for channel in publisher._channels.values()) == count)


def test_a_server_stops_before_the_trainer_loads_weights_and_resumes_once_they_are_loaded(make):
    publisher, receiver = make()
    worker = receiver("w0")
    joined(publisher)
    announced = in_thread(publisher.announce, V1, CANARY)
    staged = until(worker.take)
    assert (staged.version, staged.tensors, staged.canary) == (V1, None, CANARY)
    assert not announced.done(), "the engine has not stopped yet"
    staged.post()
    announced.result(PATIENCE_S)
    with pytest.raises(TimeoutError):  # the trainer has not loaded them yet
        staged.externally_loaded.result(0.5)
    figures = in_thread(publisher.externally_loaded)
    staged.externally_loaded.result(PATIENCE_S)
    assert not figures.done(), "the engine has not resumed under the version yet"
    worker.loaded(V1)
    published = figures.result(PATIENCE_S)
    assert (published["publish_workers"], published["publish_late"]) == (1, 0)


def test_a_worker_that_joins_later_takes_the_version_at_once(make):
    publisher, receiver = make()
    publisher.announce(V0)
    publisher.externally_loaded()
    staged = until(receiver("late").take)
    staged.post()
    staged.externally_loaded.result(PATIENCE_S)


def test_an_engine_that_does_not_stop_is_named(make):
    publisher, receiver = make(publish_deadline_s=0.3)
    receiver("busy")
    joined(publisher)
    with pytest.raises(RuntimeError, match=r"busy .*weights\.publish_deadline_s"):
        publisher.announce(V1)


def test_weights_that_are_never_loaded_end_the_channel_and_leave_the_engine_without_any(make):
    publisher, receiver = make(transfer_deadline_s=3.0)
    worker = receiver("w0")
    joined(publisher)
    in_thread(publisher.announce, V1)
    staged = until(worker.take)
    staged.post()
    with pytest.raises(RuntimeError):
        staged.externally_loaded.result(PATIENCE_S)


@pytest.fixture
def external(config_file):
    return load(config_file, EXTERNAL)


def test_a_trainer_announces_each_version_before_loading_and_confirms_it_after(external):
    broker = RecordingBroker(2)
    with Rollouts(external, 0, broker, broker) as run:
        with run.updating(lambda tokens: np.zeros(len(tokens) - 1)) as due:
            assert due and broker.calls[-1] == ("announce", 0) and set(broker.canary.logprobs) == {0.0}
        for batch in run.batches():
            run.consumed(batch)
            run.version(batch.checkpoint)
    calls = [call for call in broker.calls if call[0] in ("announce", "externally_loaded")]
    assert calls == [each for step in range(3) for each in (("announce", step), ("externally_loaded",))]
    assert broker.canary is None, "without a score function there is no canary"


def test_an_asyncio_trainer_announces_and_confirms_versions_alike(external):
    broker = RecordingBroker(1)

    async def train():
        async with aio.AsyncRollouts(lambda: Rollouts(external, 0, broker, broker)) as run:
            await run.version(0)
            async for _ in run.batches():
                async with run.updating() as due:
                    assert due and broker.calls[-1] == ("announce", 1)
            with pytest.raises(KeyError):
                async with run.updating():
                    raise KeyError("the framework has failed")

    asyncio.run(train())
    assert [call[0] for call in broker.calls if call[0] in ("announce", "externally_loaded")] == [
        "announce", "externally_loaded", "announce", "externally_loaded", "announce"
    ], "weights whose loading failed are not confirmed"  # fmt: skip


def test_servers_that_hold_newer_weights_keep_them_while_batches_come_again(external):
    broker = RecordingBroker(3, frontier=2)
    with Rollouts(external, 1, broker, broker) as run:
        with run.updating() as due:
            assert not due
        for _ in run.batches():
            with run.updating() as due:
                assert due == (run.step >= 2)
    assert [call[1] for call in broker.calls if call[0] == "announce"] == [2, 3]


def test_versions_out_of_order_are_refused(external):
    broker = RecordingBroker(1)
    run = Rollouts(external, 0, broker, broker)
    with pytest.raises(ValueError, match=r"version 3 .*0 batches"):
        run.version(3)
    with pytest.raises(RuntimeError, match=r"weights\.transport = .*run\.updating"):
        run.publish({})
    with pytest.raises(ValueError, match="score gave 1 log-probabilities"):
        run.version(0, lambda tokens: [0.0])


REFUSED = {
    "an engine that others do not reach": (EXTERNAL[:2], r"'weights.transport' = .* those of .*'torch'; use 'sglang'"),
    "vLLM servers that a worker starts": (
        [*EXTERNAL[:2], "--worker.engine", "vllm"],
        "'weights.transport' = .* in engine.url",
    ),
    "servers that a worker starts": ([*EXTERNAL, "--engine.url", "[]"], "'weights.transport' = .* in engine.url"),
    "requests that stay": ([*EXTERNAL, "--engine.pause", "retract", "--engine.stream_tokens", "1"], "'engine.pause' ="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_engines_that_a_trainer_cannot_load_are_refused(config_file, case):
    keys, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why):
        load(config_file, keys)


def test_april_s_own_learner_refuses_externally_loaded_weights(config_file, capsys):
    from april import cli

    assert cli.main(["run", str(config_file), *EXTERNAL]) == 2
    assert "waits for a trainer whose framework loads weights" in capsys.readouterr().err
