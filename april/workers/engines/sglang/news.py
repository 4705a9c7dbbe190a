"""Signal that a step on SGLang's servers waits for; the engines that share an event loop share one."""

import asyncio
import contextlib

STEP_S = 0.02
"""Longest wait of a step (s); the broker's messages and the verifiers' scores wait as long."""


class StepSignal(asyncio.Event):
    """Set when a chunk is due, a request has ended in any way, or a weight update has ended."""

    async def wait_for_work(self, expected: bool) -> None:
        """Wait for the signal, at most STEP_S. If none is `expected`, only run the event loop once."""
        if not expected:
            return await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                await self.wait()
