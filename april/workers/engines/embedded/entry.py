"""Registry entries of the embedded engines: `torch`, `torch` slowed down to the pace of other hardware, and the engine
on transformers' own models. They import no torch."""

import math
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from april.config import Config
from april.config.costs import pacing_of
from april.util.errors import refuse, refuse_for
from april.workers.engines import ENGINES
from april.workers.engines.entry import EngineEntry, MemoryShare

if TYPE_CHECKING:
    from april.workers.engines.embedded.engine import TorchEngine
    from april.workers.engines.embedded.paced import PacedEngine
    from april.workers.engines.embedded.transformers import TransformersEngine


MEMORY_OPTION = "memory_fraction"
"""Option of `engine.server`: the largest share of the accelerator's memory that torch may allocate in the worker."""
CONTEXT_BYTES = 1 << 30
"""Bytes of accelerator memory for the CUDA context and its libraries, which torch's allocator does not count."""
ACTIVATION_BYTES = 1 << 30
"""Bytes reserved for a prefill's activations, for logits, and for a group of cache rows that exists twice while it is
copied into a larger one."""


class TorchEntry(EngineEntry):
    scores = True
    limits_memory = True
    shares_time = True

    @classmethod
    def check_model(cls, config: Config) -> None:
        check_decoder(config)

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "TorchEngine":
        from april.workers.engines.base import EngineError
        from april.workers.engines.embedded.engine import TorchEngine

        limit_memory(config, device)
        try:
            return TorchEngine(
                config.model.path,
                slots=config.worker.slots,
                device=device,
                chunk_tokens=config.worker.chunk_tokens,
                report_s=config.worker.report_s,
                keep_cache=config.engine.pause == "in_place",
            )
        except EngineError as error:
            refuse_for("model.path", config.model.path, "cannot be used", error)

    @classmethod
    def installed(cls, config: Config) -> str:
        return f"torch {version('torch')}" if find_spec("torch") else ""

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError for a configuration with `engine.url`, which names servers: this engine has none. Other
        keys of [engine] are ignored."""
        if config.engine.url:
            with_servers = ENGINES.names_where(lambda entry: not entry.in_process)
            refuse(
                "engine.url",
                ",".join(config.engine.url),
                f"names servers, and 'worker.engine' is {config.worker.engine!r}, which has none",
                f"set worker.engine = {with_servers}, or leave engine.url out",
            )

    @classmethod
    def memory_options(cls, config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> MemoryShare:
        """The option that limits torch's allocator in the worker to `free_bytes`, and the bytes that are then left for
        the KV cache. A limit that the configuration sets is kept in place of `free_bytes`."""
        available = math.floor(1000 * (free_bytes - CONTEXT_BYTES) / total_bytes) / 1000
        fraction = float(config.engine.server.get(MEMORY_OPTION) or max(0.0, available))
        # While new weights are loaded, the old ones are still held.
        return MemoryShare({MEMORY_OPTION: fraction}, total_bytes * fraction - 2 * weight_bytes - ACTIVATION_BYTES)


def limit_memory(config: Config, device: str) -> None:
    """Limit the memory that torch allocates in this process, if `device` is "cuda" and `engine.server` sets
    MEMORY_OPTION, the largest share (0 to 1) of the accelerator's memory. Otherwise does nothing."""
    if device == "cuda" and (fraction := config.engine.server.get(MEMORY_OPTION)):
        import torch

        torch.cuda.set_per_process_memory_fraction(float(fraction))


def check_decoder(config: Config) -> None:
    """Raises ConfigError for a model whose structure the embedded engine cannot run (see `decoder.read_shape`)."""
    from april.workers.engines.base import EngineError
    from april.workers.engines.embedded.decoder import read_shape

    try:
        read_shape(config.model.path)
    except EngineError as error:
        refuse_for("model.path", config.model.path, "cannot be used", error)


class TransformersEntry(TorchEntry):
    returns_supports = True
    takes_images = True

    @classmethod
    def check_model(cls, config: Config) -> None:
        from april.workers.engines.base import EngineError
        from april.workers.engines.embedded.transformers import read_config

        try:
            read_config(config.model.path)
        except EngineError as error:
            refuse_for("model.path", config.model.path, "cannot be used", error)

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "TransformersEngine":  # type: ignore[override]
        from april.workers.engines.embedded.transformers import TransformersEngine

        limit_memory(config, device)
        return TransformersEngine.from_config(config, device, name)

    @classmethod
    def installed(cls, config: Config) -> str:
        return f"transformers {version('transformers')}"


class PacedEntry(EngineEntry):
    scores = True
    yields_cpu = False
    reads = ("pace", "pace_factor", "pause")

    @classmethod
    def check_model(cls, config: Config) -> None:
        check_decoder(config)

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "PacedEngine":
        from april.workers.engines.base import EngineError
        from april.workers.engines.embedded.paced import PacedEngine

        try:
            return PacedEngine(
                config.model.path,
                pacing_of(config.engine.pace),
                config.engine.pace_factor,
                config.run_dir / "paced" / f"{name}.json",
                slots=config.worker.slots,
                device=device,
                chunk_tokens=config.worker.chunk_tokens,
                report_s=config.worker.report_s,
                keep_cache=config.engine.pause == "in_place",
            )
        except EngineError as error:
            refuse_for("model.path", config.model.path, "cannot be used", error)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if not config.engine.pace:
            refuse(
                "engine.pace",
                None,
                "is missing: it names the hardware whose time the engine keeps",
                "use h100, or the file that `april calibrate` has written",
            )
        pacing_of(config.engine.pace)
