"""A run's configuration becomes an SGLang engine; what stands in the way becomes a sentence."""

import os
import tempfile
from pathlib import Path

from april.config import Config, ConfigError
from april.workers.engines.base import EngineError
from april.workers.engines.sglang import SGLangEngine
from april.workers.engines.sglang_client import ServerGone
from april.workers.engines.sglang_server import ServerSettings, SGLangServer
from april.workers.engines.sglang_weights import DiskSnapshot, LocalTensors, WeightPush

API_KEY = "APRIL_SGLANG_API_KEY"
"""environment variable with the key of a server that wants one"""


def make_sglang_engine(
    config: Config,
    device: str,
    name: str,
    engine_class: type[SGLangEngine] = SGLangEngine,
    settings_class: type[ServerSettings] = ServerSettings,
) -> SGLangEngine:
    """`name` of the worker, for the server's log. Blocks until the server serves. Raises ConfigError."""
    engine, worker = config.engine, config.worker
    if config.vocabulary is None or config.context_tokens is None:
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} has a config.json without vocab_size or "
            "max_position_embeddings; give a whole Hugging Face folder"
        )
    try:
        return engine_class(
            config.model.path,
            vocabulary=config.vocabulary,
            max_context=config.context_tokens,
            slots=worker.slots,
            chunk_tokens=worker.chunk_tokens,
            chunk_s=worker.chunk_s,
            stream_tokens=engine.stream_tokens,
            pause=engine.pause,
            stall_s=engine.stall_s,
            update_s=engine.update_s,
            start_s=engine.start_s,
            max_restarts=engine.max_restarts,
            server=None if engine.url else SGLangServer(server_settings(config, device, name, settings_class)),
            url=engine.url,
            api_key=os.environ.get(API_KEY, ""),
            push=make_push(config),
        )
    except (EngineError, ServerGone) as error:
        raise ConfigError(str(error)) from None


def server_settings(
    config: Config, device: str, name: str, settings_class: type[ServerSettings] = ServerSettings
) -> ServerSettings:
    logs = config.run_dir / "logs"
    folder = logs if logs.is_dir() else Path(tempfile.gettempdir())
    context = min(config.context_tokens, config.longest_prompt_tokens + config.sampling.max_response_tokens)
    return settings_class(
        python=config.engine_python.absolute(),
        model=config.model.path,
        log=(folder / f"{name}-{settings_class.name.lower()}.log").absolute(),
        device=device,
        slots=config.worker.slots,
        context_tokens=context,
        port=config.engine.port,
        threads=config.worker.threads,
        start_s=config.engine.start_s,
        options=config.engine.server,
    )


def make_push(config: Config) -> WeightPush:
    if config.engine.weights == "tensor":
        return LocalTensors(config.model.path, config.engine.tensor_ranks)
    return DiskSnapshot(config.model.path, config.engine.snapshot_dir)
