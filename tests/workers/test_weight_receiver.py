"""Weights received over a weight channel are loaded, refused, or requested again."""

import asyncio

import pytest

from april.weights.channel import Adapter
from april.weights.source import StagedWeights
from april.workers.engines.base import EngineError
from april.workers.engines.conformance.harness import V0, V1
from april.workers.engines.sglang.channel import ServerWeightLoader
from april.workers.engines.weight_loading import WeightLoader
from tests.support.published_weights import Receiver


class Engine:
    """Fake engine that refuses V1; as a server engine it loads in `passes` passes of the event loop."""

    ready, version, passes = True, None, 0

    def load_weights(self, version, tensors):
        if version == V1:
            raise EngineError("not these")
        self.version = version

    def load_adapter(self, version, adapter, tensors):
        self.version, self.adapter_args = version, (adapter, tensors)

    async def update_adapter(self, version, adapter, tensors, verify=None):
        self.load_adapter(version, adapter, tensors)

    async def update_weights(self, version, tensors, verify=None):
        for _ in range(self.passes):
            await asyncio.sleep(0)
        self.load_weights(version, tensors)


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_staged_weights_are_loaded_and_a_refusal_is_reported():
    receiver = Receiver(V0, V1)
    loader = WeightLoader(Engine(), receiver)
    assert loader.load() > 0 and receiver.held == loader.engine.version == V0
    assert loader.load() is None and receiver.reported == ["not these"] and receiver.held == V0
    assert loader.load() is None and receiver.reported == ["not these"]


def test_an_engine_gets_weights_only_when_ready_and_gets_lost_ones_again():
    receiver = Receiver(V0, V0)
    loader = WeightLoader(Engine(), receiver)
    loader.load()
    loader.engine.ready, loader.engine.version = False, None
    assert loader.load() is None and receiver.reported == []
    loader.engine.ready = True
    assert loader.load() > 0 and receiver.reported == ["forget"] and loader.engine.version == V0


def test_a_server_loads_weights_in_the_background(loop):
    receiver, engine = Receiver(V0, V1), Engine()
    engine.begin, engine.passes = loop.create_task, 3
    loader, passes = ServerWeightLoader(engine, receiver), 0
    while loader.load() is None:
        loop.run_until_complete(asyncio.sleep(0))
        passes += 1
    assert passes > 0 and receiver.held == V0
    while not receiver.reported:
        assert loader.load() is None and receiver.held == V0
        loop.run_until_complete(asyncio.sleep(0))
    assert receiver.reported == ["not these"]


def test_an_adapter_is_passed_to_an_engine_that_loads_adapters(loop):
    adapter = Adapter("0badcafe", 2.0, "float32")
    for kind in (WeightLoader, ServerWeightLoader):
        receiver, engine = Receiver(), Engine()
        engine.begin = loop.create_task
        receiver.staged = [StagedWeights(V0, {"layer.lora_A": 1}, 0.0, adapter=adapter)]
        loader = kind(engine, receiver)
        while loader.load() is None:
            loop.run_until_complete(asyncio.sleep(0))
        assert receiver.held == engine.version == V0 and engine.adapter_args == (adapter, {"layer.lora_A": 1})
