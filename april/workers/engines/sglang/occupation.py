"""Releases and reacquires a server's accelerator memory: weights, KV cache and CUDA graphs.

Weights have to be loaded again afterwards. On an accelerator this needs SGLang's memory saver, which April sets.
"""

import asyncio

from april.workers.engines.sglang.client import SGLangClient

MEMORY_SAVER = "enable_memory_saver"
CALL_S = 3600.0
"""Deadline of the calls: practically none, since the caller has one (s)."""
LOOK_S = 0.02


async def release_memory(client: SGLangClient) -> None:
    """Release the memory once the server is idle; SGLang would end with a failed assertion otherwise.

    Raises ServerGone and ServerRefuses.
    """
    while is_busy(await client.call("/v1/loads")):
        await asyncio.sleep(LOOK_S)
    await client.call("/release_memory_occupation", {}, CALL_S)


async def resume_memory(client: SGLangClient) -> None:
    """Acquire the memory again. Raises ServerGone and ServerRefuses."""
    await client.call("/resume_memory_occupation", {}, CALL_S)


def is_busy(loads: dict) -> bool:
    return any(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads["loads"])
