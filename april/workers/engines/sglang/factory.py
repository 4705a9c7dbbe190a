"""Builds an engine on SGLang servers from a run's configuration."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from april.config import Config, ConfigError
from april.util.errors import refuse
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError
from april.workers.engines.sglang.client import API_KEY, ServerGone
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.fleet import SGLangFleet
from april.workers.engines.sglang.run import StepSignal
from april.workers.engines.sglang.server import (
    AttachedServer,
    ServerSettings,
    SGLangServer,
    check_ranks,
    check_speculation,
    server_python,
)
from april.workers.engines.sglang.weights import MEMORY_SAVER, DiskSnapshot, LocalTensors, WeightPush


def make_sglang_engine(
    config: Config,
    device: str,
    name: str,
    engine_class: type[SGLangEngine] = SGLangEngine,
    settings_class: type[ServerSettings] = ServerSettings,
) -> SGLangFleet:
    """Start or attach the servers of worker `name`, and return their engine.

    Blocks until all servers serve. Raises ConfigError.
    """
    engine, worker = config.engine, config.worker
    if config.vocabulary is None or config.context_tokens is None:
        refuse(
            "model.path",
            config.model.path,
            "has a config.json without vocab_size or max_position_embeddings",
            "give a whole Hugging Face folder",
        )
    loop, step_signal = asyncio.new_event_loop(), StepSignal()
    servers: Sequence[SGLangServer | AttachedServer]
    if engine.url:
        servers = [AttachedServer(url, engine.start_s) for url in engine.url]
    else:
        servers = [SGLangServer(settings) for settings in server_settings(config, device, name, settings_class)]
    with contextlib.ExitStack() as undo:
        undo.callback(loop.close)
        try:
            check_speculation(engine.server, engine.server.get("device", device), on_rocm())
            for server in servers:
                undo.callback(server.kill)
                server.spawn()
            engines = []
            for server in servers:
                server_engine = engine_class(
                    config.model.path,
                    vocabulary=config.vocabulary,
                    max_context=config.context_tokens,
                    slots=worker.slots,
                    chunk_tokens=worker.chunk_tokens,
                    report_s=worker.report_s,
                    stream_tokens=engine.stream_tokens,
                    pause=engine.pause,
                    stall_s=engine.stall_s,
                    update_s=engine.update_s,
                    max_restarts=engine.max_restarts,
                    server=server,
                    api_key=api_key(engine.server),
                    push=make_push(config),
                    loop=loop,
                    step_signal=step_signal,
                )
                engines.append(server_engine)
                undo.callback(server_engine.close)
                if not engine.url:
                    check_ranks(server_engine.info, engine.tensor_ranks)
        except (EngineError, ServerGone) as error:
            raise ConfigError(str(error)) from None
        undo.pop_all()
    return SGLangFleet(engines, loop, step_signal)


def api_key(options: Mapping[str, Any]) -> str:
    """API key of the server, from its options or the environment; empty if there is none."""
    return str(options.get("api_key") or os.environ.get(API_KEY, ""))


def on_rocm() -> bool:
    import torch

    return torch.version.hip is not None


def server_settings(
    config: Config, device: str, name: str, settings_class: type[ServerSettings] = ServerSettings
) -> list[ServerSettings]:
    """Settings of each server that the worker `name` starts on `device`, "cpu" or "cuda": the servers have consecutive
    ports and accelerators. `settings_class`: that of the kind of server, SGLang or vLLM."""
    engine, logs = config.engine, config.run_dir / "logs"
    folder = logs if logs.is_dir() else Path(tempfile.gettempdir())
    longest = config.longest_prompt_tokens + config.sampling.max_response_tokens
    context = min(config.context_tokens or longest, longest)
    settings, entry = [], ENGINES.find(config.worker.engine)
    for index, server in enumerate(entry.engine_names(config, name)):
        first_device = engine.server.get("base_gpu_id", 0) + index * engine.tensor_ranks
        placement_options: dict[str, Any] = {"base_gpu_id": first_device} if device == "cuda" and index else {}
        placement_options |= {MEMORY_SAVER: True} if device == "cuda" and config.devices.turns else {}
        settings.append(
            settings_class(
                python=server_python(config, settings_class.name).absolute(),
                model=config.model.path,
                log=(folder / f"{server}-{settings_class.name.lower()}.log").absolute(),
                device=device,
                slots=config.worker.slots,
                context_tokens=context,
                port=engine.port and engine.port + index,
                threads=config.worker.threads,
                start_s=engine.start_s,
                adapter_rank=config.lora.rank if entry.takes_adapters(config) else 0,
                options=engine.server | placement_options,
            )
        )
    return settings


def make_push(config: Config) -> WeightPush:
    if config.engine.weights == "tensor":
        return LocalTensors(config.model.path)
    return DiskSnapshot(config.model.path, config.engine.snapshot_dir)
