"""Weights that others bring: engines stop before, and go on under the new name only after it was said."""

import asyncio
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from april.config import ConfigError, WeightsSection, load
from april.processes import clock
from april.rollouts import aio
from april.rollouts.run import Rollouts
from april.weights.canary import Canary
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.version import Version
from tests.rollouts.books import Books

V0, V1 = Version(0, 0), Version(0, 1)
CANARY = Canary([1, 2, 3], [-1.0, -2.0], "float32")
EXTERNAL = ["--weights.transport", "external", "--worker.engine", "sglang", "--engine.url", "http://127.0.0.1:1"]
PATIENCE_S = 60.0


@pytest.fixture
def make():
    """(publisher, make(name) -> receiver)"""
    made = []

    def publisher(**keys):
        section = WeightsSection(transport="external", **keys)
        one = WeightPublisher(section, "test", "cpu")
        made.append(one)

        def receiver(name):
            made.append(WeightReceiver(section, f"uid-{name}", name, "cpu"))
            made[-1].connect(one.address)
            return made[-1]

        return one, receiver

    yield publisher
    for one in reversed(made):
        one.close()


def in_thread(work, *arguments):
    done = Future()

    def run():
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def until(what):
    deadline = clock.now() + PATIENCE_S
    while not (found := what()):
        assert clock.now() < deadline
        time.sleep(0.01)
    return found


def joined(publisher, count=1):
    return until(lambda: sum(lane.state == "ready" for lane in publisher._lanes.values()) == count)


def test_a_server_stops_before_others_change_it_and_goes_on_once_they_are_done(make):
    publisher, receiver = make()
    worker = receiver("w0")
    joined(publisher)
    announced = in_thread(publisher.announce, V1, CANARY)
    staged = until(worker.take)
    assert (staged.version, staged.tensors, staged.canary) == (V1, None, CANARY)
    assert not announced.done(), "the engine has not stopped yet"
    staged.post()
    announced.result(PATIENCE_S)
    with pytest.raises(TimeoutError):  # others have not brought them yet
        staged.brought.result(0.5)
    figures = in_thread(publisher.brought)
    staged.brought.result(PATIENCE_S)
    assert not figures.done(), "the engine does not go on under the name yet"
    worker.loaded(V1)
    said = figures.result(PATIENCE_S)
    assert (said["publish_workers"], said["publish_late"]) == (1, 0)


def test_who_joins_later_takes_the_name_at_once(make):
    publisher, receiver = make()
    publisher.announce(V0)
    publisher.brought()
    staged = until(receiver("late").take)
    staged.post()
    staged.brought.result(PATIENCE_S)


def test_an_engine_that_does_not_stop_is_named(make):
    publisher, receiver = make(publish_deadline_s=0.3)
    receiver("busy")
    joined(publisher)
    with pytest.raises(RuntimeError, match=r"busy still generates 0.3 s after .* was announced"):
        publisher.announce(V1)


def test_weights_that_never_come_end_the_lane_and_the_engine_has_none(make):
    publisher, receiver = make(transfer_deadline_s=3.0)
    worker = receiver("w0")
    joined(publisher)
    in_thread(publisher.announce, V1)
    staged = until(worker.take)
    staged.post()
    with pytest.raises(RuntimeError):
        staged.brought.result(PATIENCE_S)


@pytest.fixture
def external(config_file):
    return load(config_file, EXTERNAL)


def test_a_trainer_says_what_its_framework_loads_before_and_after(external):
    books = Books(2)
    with Rollouts(external, 0, books, books) as run:
        with run.updating(lambda tokens: np.zeros(len(tokens) - 1)) as due:
            assert due and books.said[-1] == ("announce", 0) and set(books.canary.logprobs) == {0.0}
        for batch in run.batches():
            run.consumed(batch)
            run.version(batch.checkpoint)
    said = [one for one in books.said if one[0] in ("announce", "brought")]
    assert said == [("announce", 0), ("brought",), ("announce", 1), ("brought",), ("announce", 2), ("brought",)]
    assert books.canary is None, "no score was given, and nothing is proven"


def test_an_asyncio_trainer_says_the_same(external):
    books = Books(1)

    async def train():
        async with aio.AsyncRollouts(lambda: Rollouts(external, 0, books, books)) as run:
            await run.version(0)
            async for _ in run.batches():
                async with run.updating() as due:
                    assert due and books.said[-1] == ("announce", 1)
            with pytest.raises(KeyError):
                async with run.updating():
                    raise KeyError("the framework has failed")

    asyncio.run(train())
    assert [one[0] for one in books.said if one[0] in ("announce", "brought")] == [
        "announce", "brought", "announce", "brought", "announce"
    ], "weights that have failed to come are not said to be there"  # fmt: skip


def test_servers_that_hold_newer_weights_keep_them_while_batches_come_again(external):
    books = Books(3, frontier=2)
    with Rollouts(external, 1, books, books) as run:
        with run.updating() as due:
            assert not due
        for _ in run.batches():
            with run.updating() as due:
                assert due == (run.step >= 2)
    assert [one[1] for one in books.said if one[0] == "announce"] == [2, 3]


def test_what_is_said_out_of_order_is_refused(external):
    books = Books(1)
    run = Rollouts(external, 0, books, books)
    with pytest.raises(ValueError, match="version 3 was said of weights that hold 0 batches"):
        run.version(3)
    with pytest.raises(RuntimeError, match=r"leaves it to your framework to load weights; call run.updating"):
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
def test_where_others_cannot_bring_them_it_is_refused(config_file, case):
    keys, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why):
        load(config_file, keys)


def test_april_s_own_learner_does_not_run_on_it(config_file, capsys):
    from april import cli

    assert cli.main(["run", str(config_file), *EXTERNAL]) == 2
    assert "waits for a trainer whose framework loads weights" in capsys.readouterr().err
