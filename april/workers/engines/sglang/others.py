"""Weights that a process outside April loads into a server; April only pauses the server and names their version."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.weights import UPDATE_S, HalfLoaded


async def adopt_external_weights(
    client: SGLangClient, post: Callable[[], None], loaded: Future[None], change: dict
) -> None:
    """Announce with `post` that the server is paused, wait until the weights are `loaded`, and set their version name.

    The server's prefix cache is flushed in any case. Raises HalfLoaded if they were not loaded.
    """
    post()
    try:
        await asyncio.wrap_future(loaded)
    except RuntimeError as error:
        raise HalfLoaded(f"others have not loaded version {change['weight_version']}: {error}") from None
    await client.call("/flush_cache", {}, UPDATE_S)
    name = {"new_version": change["weight_version"], "abort_all_requests": False}
    await client.call("/update_weight_version", name, UPDATE_S)
