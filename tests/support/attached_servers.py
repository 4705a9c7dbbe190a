"""Starts real SGLang and vLLM servers for tests of engines that attach to a running server."""

import asyncio
from pathlib import Path

from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.server import ServerSettings, SGLangServer

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"


def serve(settings: ServerSettings):
    server = SGLangServer(settings)
    server.spawn()
    asyncio.run(wait_for(server))
    yield server
    server.kill()


async def wait_for(server: SGLangServer) -> None:
    client = SGLangClient(server.url)
    await server.wait(client)
    await client.close()
