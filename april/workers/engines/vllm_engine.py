"""vLLM as an engine: SGLang's, before a server that runs `vllm_program.py`."""

from april.config import Config
from april.workers.engines.base import EngineError, Request
from april.workers.engines.sglang import SGLangEngine
from april.workers.engines.sglang_engine import make_sglang_engine
from april.workers.engines.vllm_server import VLLMSettings


class VLLMEngine(SGLangEngine):
    server_name = "vLLM"

    def submit(self, request: Request) -> None:
        if request.temperature and (request.top_p != 1 or request.top_k):
            raise EngineError(
                f"request {request.id} has top_p = {request.top_p}, top_k = {request.top_k}; vLLM's log-probabilities "
                "would be those of what the cut leaves, so use 1 and 0, or another engine"
            )
        super().submit(request)


def make_vllm_engine(config: Config, device: str, name: str) -> SGLangEngine:
    """As `make_sglang_engine`."""
    return make_sglang_engine(config, device, name, VLLMEngine, VLLMSettings)
