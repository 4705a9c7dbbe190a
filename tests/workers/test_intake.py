"""What has arrived through a lane is loaded, refused, or asked for again."""

import asyncio

import pytest

from april.weights.lane_messages import Adapter
from april.weights.receiver import Staged
from april.workers.engines.base import EngineError
from april.workers.engines.conformance.driving import V0, V1
from april.workers.engines.intake import Intake
from april.workers.engines.sglang.intake import ServerIntake


class Receiver:
    """Has staged what it is given, and notes what it is told."""

    def __init__(self, *versions):
        self.staged = [Staged(version, {}, 0.0) for version in versions]
        self.held, self.told = None, []

    @property
    def has_staged(self):
        return bool(self.staged)

    def take(self):
        return self.staged.pop(0) if self.staged else None

    def loaded(self, version):
        self.held = version

    def refuse(self, why, wrong=False):
        self.told.append(why)

    def forget(self):
        self.held = None
        self.told.append("forget")


class Engine:
    """Refuses V1; the same beside everything else, in as many turns as it is told."""

    ready, version, turns = True, None, 0

    def load_weights(self, version, tensors):
        if version == V1:
            raise EngineError("not these")
        self.version = version

    def load_adapter(self, version, adapter, tensors):
        self.version, self.beside = version, (adapter, tensors)

    async def take_adapter(self, version, adapter, tensors, prove=None):
        self.load_adapter(version, adapter, tensors)

    async def take_weights(self, version, tensors, prove=None):
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.load_weights(version, tensors)


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_what_has_arrived_is_loaded_and_what_is_refused_is_told():
    receiver = Receiver(V0, V1)
    intake = Intake(Engine(), receiver)
    assert intake.load() > 0 and receiver.held == intake.engine.version == V0
    assert intake.load() is None and receiver.told == ["not these"] and receiver.held == V0
    assert intake.load() is None and receiver.told == ["not these"]


def test_an_engine_that_is_not_ready_is_left_alone_and_one_that_has_lost_its_weights_gets_them_again():
    receiver = Receiver(V0, V0)
    intake = Intake(Engine(), receiver)
    intake.load()
    intake.engine.ready, intake.engine.version = False, None
    assert intake.load() is None and receiver.told == []
    intake.engine.ready = True
    assert intake.load() > 0 and receiver.told == ["forget"] and intake.engine.version == V0


def test_a_server_takes_its_weights_beside_everything_else(loop):
    receiver, engine = Receiver(V0, V1), Engine()
    engine.begin, engine.turns = loop.create_task, 3
    intake, turns = ServerIntake(engine, receiver), 0
    while intake.load() is None:
        loop.run_until_complete(asyncio.sleep(0))
        turns += 1
    assert turns > 0 and receiver.held == V0
    while not receiver.told:
        assert intake.load() is None and receiver.held == V0
        loop.run_until_complete(asyncio.sleep(0))
    assert receiver.told == ["not these"]


def test_an_adapter_that_is_to_be_taken_as_it_comes_is_given_to_the_engine_so(loop):
    adapter = Adapter("0badcafe", 2.0, "float32")
    for kind in (Intake, ServerIntake):
        receiver, engine = Receiver(), Engine()
        engine.begin = loop.create_task
        receiver.staged = [Staged(V0, {"layer.lora_A": 1}, 0.0, adapter=adapter)]
        intake = kind(engine, receiver)
        while intake.load() is None:
            loop.run_until_complete(asyncio.sleep(0))
        assert receiver.held == engine.version == V0 and engine.beside == (adapter, {"layer.lora_A": 1})
