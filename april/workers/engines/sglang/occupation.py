"""A server lets go of its accelerator's memory, and takes it again: weights, KV cache and CUDA graphs. Weights have to
be loaded anew then. With an accelerator it wants SGLang's memory saver, which April then sets."""

import asyncio

from april.workers.engines.sglang.client import SGLangClient

SAVER = "enable_memory_saver"
CALL_S = 3600.0
"""no limit of its own: who calls has one"""
LOOK_S = 0.02


async def let_go(client: SGLangClient) -> None:
    """Once nothing runs in it: SGLang ends with a failed assertion otherwise. Raises ServerGone, ServerRefuses."""
    while is_busy(await client.call("/v1/loads")):
        await asyncio.sleep(LOOK_S)
    await client.call("/release_memory_occupation", {}, CALL_S)


async def take_again(client: SGLangClient) -> None:
    """Raises ServerGone, ServerRefuses."""
    await client.call("/resume_memory_occupation", {}, CALL_S)


def is_busy(loads: dict) -> bool:
    return any(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads["loads"])
