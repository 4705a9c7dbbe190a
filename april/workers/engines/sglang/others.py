"""Weights that others load into a server, whose name alone comes from April."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.weights import UPDATE_S, HalfLoaded


async def take_name(client: SGLangClient, post: Callable[[], None], brought: Future[None], change: dict) -> None:
    """Say by `post` that the server has stopped, and name what it holds once others have `brought` it. Its prefix cache
    is emptied, whatever they have done. Raises HalfLoaded where they have not."""
    post()
    try:
        await asyncio.wrap_future(brought)
    except RuntimeError as error:
        raise HalfLoaded(f"others have not brought version {change['weight_version']}: {error}") from None
    await client.call("/flush_cache", {}, UPDATE_S)
    name = {"new_version": change["weight_version"], "abort_all_requests": False}
    await client.call("/update_weight_version", name, UPDATE_S)
