"""When a step on SGLang's servers ends: with something to hand over, not with every event that a server sends.

Nothing here may wait for the end of STEP_S: it is longer than a test may take.
"""

import asyncio

import pytest

from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, V1, VOCABULARY, prompt
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.fleet import SGLangFleet
from april.workers.engines.sglang.run import StepSignal

pytestmark = [pytest.mark.timeout(900), pytest.mark.sglang]


@pytest.fixture
def fleet(sglang_server, tiny_model, monkeypatch):
    """Two engines on one server; the first returns a request in one chunk, the second in chunks of 5 tokens."""
    loop, step_signal = asyncio.new_event_loop(), StepSignal()
    options = {"url": sglang_server.url, "stream_tokens": 5, "report_s": 1e9, "loop": loop, "step_signal": step_signal}
    engines = [SGLangEngine(tiny_model().folder, VOCABULARY, 640, chunk_tokens=n, **options) for n in (1000, 5)]
    for engine in engines:
        engine.load_weights(V0, tiny_model().weights())
        engine.step()
    monkeypatch.setattr("april.workers.engines.sglang.run.STEP_S", 1e6)
    fleet = SGLangFleet(engines, loop, step_signal)
    yield fleet
    fleet.cancel_all(range(10))
    fleet.close()


def test_a_step_ends_with_a_chunk_and_not_with_an_event(fleet):
    first, _ = fleet.engines
    first.submit(Request(1, prompt(), 60))
    (chunk,) = first.step()
    assert len(chunk.tokens) == 60 and chunk.finish_reason == "length"


def test_a_step_ends_when_any_of_several_servers_has_a_chunk(fleet):
    """A step does not wait for the other servers."""
    first, second = fleet.engines
    first.submit(Request(1, prompt(), 600))
    second.submit(Request(2, prompt(), 5))
    (chunk,) = fleet.step()
    assert chunk.id == 2 and 1 in first


def test_a_step_ends_when_a_weight_update_ends(fleet, tiny_model):
    second = fleet.engines[1]
    change = second.begin(second.update_weights(V1, tiny_model(seed=1).weights()))
    while not change.done():
        assert fleet.step() == []
    assert fleet.version == V1


def test_a_step_ends_when_a_server_is_lost(fleet):
    first, second = fleet.engines
    first.submit(Request(1, prompt(), 600))

    async def lose():
        first._mark_lost("it is gone")

    second.begin(lose())
    fleet.step()
    assert fleet.failures() == [(1, "it is gone")] and not first.ready
