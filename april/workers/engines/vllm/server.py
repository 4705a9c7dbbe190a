"""A vLLM server as a child process: what it is started with. All else is as with SGLang's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from april.workers.engines.sglang.server import HOST, ServerSettings
from april.workers.engines.vllm.adapters import room_for

PROGRAM = Path(__file__).with_name("program.py")
CPU_BLOCK_TOKENS = 128
"""in a block of vLLM's KV memory on a CPU"""


@dataclass(frozen=True)
class VLLMSettings(ServerSettings):
    """`options` are vLLM's own, by their names with underscores, and win."""

    name: ClassVar[str] = "vLLM"

    def program(self) -> list[str]:
        """-P: the program's neighbours are no modules of vLLM's."""
        return ["-P", str(PROGRAM)]

    def own_options(self, port: int) -> dict[str, Any]:
        """What the program does not set itself.

        On a CPU a prompt is computed whole: vLLM's runner turns the generator of a seeded request back when a step has
        computed a part of its prompt, and a generator on a CPU cannot be turned back, which ends the engine.
        """
        given: dict[str, Any] = {
            "model": str(self.model.absolute()), "host": HOST, "port": port, "max_num_seqs": self.slots,
        }  # fmt: skip
        if self.context_tokens:
            given["max_model_len"] = self.context_tokens
        if self.adapter_rank:
            room = room_for(self.adapter_rank)
            given |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 2}
        if self.device == "cpu":
            given |= {"dtype": "float32", "enforce_eager": True, "no_enable_chunked_prefill": True}
            if self.context_tokens:
                given["num_gpu_blocks_override"] = self.slots * (self.context_tokens // CPU_BLOCK_TOKENS + 1) + 1
        return given

    def own_environment(self) -> dict[str, str]:
        """Its processes speak to each other on this machine alone, and are spawned, so that each runs the program.

        On a CPU nothing is compiled, which would hold the first tokens up for a minute and more.
        """
        own = {
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.threads), "VLLM_HOST_IP": HOST,
            "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }  # fmt: skip
        if self.device == "cpu":
            own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
        return own
