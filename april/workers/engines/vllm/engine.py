"""vLLM as an engine: SGLang's engine, on a server that runs `program.py`."""

from collections.abc import Container

from april.config import Config
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.factory import make_sglang_engine
from april.workers.engines.sglang.fleet import SGLangFleet
from april.workers.engines.vllm.server import VLLMSettings


class VLLMEngine(SGLangEngine):
    server_name = "vLLM"

    def check(self, request: Request, live: Container[int]) -> None:
        super().check(request, live)
        if request.top_p != 1 or request.top_k or request.min_p or request.with_support:
            raise EngineError(
                f"request {request.id} has top_p = {request.top_p}, top_k = {request.top_k}, min_p = {request.min_p}, "
                f"with_support = {request.with_support}; vLLM's log-probabilities would be those of what the cut "
                "leaves, without saying what that is: use 1, 0, 0 and False, or worker.engine = "
                f"{ENGINES.names_where(lambda engine: engine.returns_supports)}"
            )


def make_vllm_engine(config: Config, device: str, name: str) -> SGLangFleet:
    """As `make_sglang_engine`, with a vLLM server."""
    return make_sglang_engine(config, device, name, VLLMEngine, VLLMSettings)
