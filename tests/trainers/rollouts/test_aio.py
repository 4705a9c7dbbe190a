"""An asyncio trainer: the same calls in the same order, and nobody waits for one that was cancelled."""

import asyncio
import threading

import pytest
import torch

from april.config import load
from april.trainers.rollouts import aio
from april.trainers.rollouts.run import Rollouts
from tests.support.recording_broker import RecordingBroker

WEIGHTS = {"weight": torch.ones(2)}


def test_the_calls_come_in_the_order_in_which_they_are_awaited(config_file):
    broker = RecordingBroker(2)

    async def train():
        config = load(config_file, ["--data.source", "submitted"])
        async with aio.AsyncRollouts(lambda: Rollouts(config, 0, broker, broker)) as run:
            await run.publish(WEIGHTS)
            assert await run.submit([[1], [2]]) == 2 == run.submitted
            async for batch in run.batches():
                await run.consumed(batch, {"loss": 1.0})
                await run.publish(WEIGHTS)
                await run.durable(batch)

    asyncio.run(train())
    calls = [one[:2] for one in broker.calls if one[0] != "submit"]
    assert [one for one in calls if one[0] != "durable"] == [
        ("start", 0), ("publish", 0), ("consumed", 0), ("publish", 1), ("consumed", 1), ("publish", 2)
    ]  # fmt: skip
    assert [one for one in calls if one[0] == "durable"] == [("durable", 1), ("durable", 2)]


def test_leaving_does_not_wait_for_a_cancelled_take(config_file):
    broker, arrives = RecordingBroker(1), threading.Event()
    at_once = broker.fetch
    broker.fetch = lambda step: at_once(step) if arrives.wait(120) else None

    async def train():
        async with aio.AsyncRollouts(lambda: Rollouts(load(config_file), 0, broker, broker)) as run:
            await run.publish(WEIGHTS)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.take(), 0.05)

    try:
        asyncio.run(asyncio.wait_for(train(), 60))
        assert not arrives.is_set()
    finally:
        arrives.set()
