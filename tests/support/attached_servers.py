"""Starts real SGLang and vLLM servers for tests of engines that attach to a running server, and of teachers."""

import asyncio
from pathlib import Path

from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.server import SGLANG_PROGRAM, ServerSettings, SGLangServer
from april.workers.engines.vllm.engine import VLLMSettings

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"


class PlainVLLM(VLLMSettings):
    """vLLM's own server of OpenAI's API, in the place of April's program."""

    def program(self) -> list[str]:
        return ["-c", SGLANG_PROGRAM.replace("sglang.launch_server", "vllm.entrypoints.openai.api_server")]

    def own_environment(self) -> dict[str, str]:
        """With /server_info, by which its start is awaited."""
        return super().own_environment() | {"VLLM_SERVER_DEV_MODE": "1"}


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
