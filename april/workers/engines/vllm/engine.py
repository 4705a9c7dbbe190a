"""vLLM as an engine: SGLang's engine, on a server that runs `program.py`."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from april.config import Config
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.factory import make_sglang_engine
from april.workers.engines.sglang.fleet import SGLangFleet
from april.workers.engines.sglang.server import HOST, ServerSettings

SUPPORTED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM accepts as `max_lora_rank`."""


def supported_rank(rank: int) -> int | None:
    """The smallest supported rank that is at least `rank`; None if there is none."""
    return next((supported for supported in SUPPORTED_RANKS if supported >= rank), None)


PROGRAM = Path(__file__).with_name("program.py")
CPU_BLOCK_TOKENS = 128
"""Tokens per block of vLLM's KV cache on a CPU."""


@dataclass(frozen=True)
class VLLMSettings(ServerSettings):
    """Command line and environment of a vLLM server. `options`: options of vLLM's command line, with underscores for
    hyphens; they override those that April sets."""

    name: ClassVar[str] = "vLLM"

    def program(self) -> list[str]:
        """Interpreter arguments that start `program.py`; -P keeps the modules of its folder from shadowing others."""
        return ["-P", str(PROGRAM)]

    def own_options(self, port: int) -> dict[str, Any]:
        """Options that April sets for a server at `port`, besides those that its `program.py` sets itself.

        On a CPU, chunked prefill is off: vLLM rewinds the generator of a seeded request after each partial prefill, and
        a CPU generator cannot be rewound, which would end the engine.
        """
        given: dict[str, Any] = {
            "model": str(self.model.absolute()), "host": HOST, "port": port, "max_num_seqs": self.slots,
        }  # fmt: skip
        if self.context_tokens:
            given["max_model_len"] = self.context_tokens
        if self.adapter_rank:
            max_rank = supported_rank(self.adapter_rank)
            given |= {"enable_lora": True, "max_lora_rank": max_rank, "max_loras": 1, "max_cpu_loras": 2}
        if self.device == "cpu":
            given |= {"dtype": "float32", "enforce_eager": True, "no_enable_chunked_prefill": True}
            if self.context_tokens:
                given["num_gpu_blocks_override"] = self.slots * (self.context_tokens // CPU_BLOCK_TOKENS + 1) + 1
        return given

    def own_environment(self) -> dict[str, str]:
        """Environment of vLLM's processes: they connect on this machine only, and are spawned, so each runs program.py.

        On a CPU, compilation is off: it would delay the first tokens by a minute and more.
        """
        own = {
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.threads), "VLLM_HOST_IP": HOST,
            "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }  # fmt: skip
        if self.device == "cpu":
            own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
        return own


class VLLMEngine(SGLangEngine):
    """SGLang's engine on a vLLM server, which samples from the whole distribution only."""

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
    """Start the vLLM servers of worker `name` on `device`, and return their engine. Blocks until all servers serve.
    Raises ConfigError."""
    return make_sglang_engine(config, device, name, VLLMEngine, VLLMSettings)
