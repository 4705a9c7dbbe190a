"""What a step on SGLang's servers waits for: something to hand over, from any of the engines that share a loop."""

import asyncio
import contextlib

STEP_S = 0.02
"""a step waits so long at most, and with it the broker's messages and the verifiers' answers"""


class News(asyncio.Event):
    """Set with a chunk to hand over, the end of a request however it comes, and that of a change of weights."""

    async def come(self, expected: bool) -> None:
        """Wait until there are some, for STEP_S; where none are `expected`, the loop goes round once."""
        if not expected:
            return await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                await self.wait()
