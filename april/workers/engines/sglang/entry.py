"""Registry entries of engines on SGLang servers, and on servers with the same HTTP API; a server's share of memory."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from april.config import Config, EngineSection
from april.util.errors import NotTried, refuse
from april.weights import TRANSPORTS
from april.workers.engines.entry import EngineEntry, MemoryShare

if TYPE_CHECKING:
    from april.weights.source import WeightSource
    from april.workers.engines.sglang.engine import SGLangEngine
    from april.workers.engines.sglang.fleet import SGLangFleet
    from april.workers.engines.weight_loading import WeightLoader


PLACING_OPTIONS = ("base_gpu_id", "gpu_id_step")
"""Options that place a server on accelerators; `april run` sets them itself."""


class ServerEntry(EngineEntry):
    """Entry of an engine on servers that have SGLang's HTTP API."""

    in_process = False
    keeps_prefixes = True
    accepts_external_weights = True
    scores = True
    reads = tuple(EngineSection.model_fields.keys() - {"pace", "pace_factor"})
    tensor_parallel: ClassVar[str] = "tp_size"
    """The server's option for its number of tensor-parallel ranks."""
    package: ClassVar[tuple[str, ...]] = ("SGLang", "sglang")
    """Name of the server, then the names of Python packages that contain it."""
    models: ClassVar[str] = "srt/models"
    """Folder of model classes in the server's package."""

    @classmethod
    def installed(cls, config: Config) -> str:
        from april.workers.engines.sglang.server import installed_server

        name, *packages = cls.package
        return "servers that others keep" if config.engine.url else installed_server(config, name, tuple(packages))

    @classmethod
    def check_model(cls, config: Config) -> None:
        """Raises NotTried for an architecture that the server's package has no class for: the server may run it by
        transformers' class, which only its start shows."""
        from april.workers.engines.sglang.server import unknown_architectures

        name, module, *_ = cls.package
        if config.engine.url:
            raise NotTried(f"key 'engine.url': whether the servers run {config.model.path} was not asked")
        if unknown := unknown_architectures(config, name, module, cls.models):
            raise NotTried(
                f"key 'model.path' = {str(config.model.path)!r}: {name} has no class of its own for {unknown[0]}; "
                "whether it runs the model by transformers' class shows when the server starts"
            )

    @classmethod
    def devices(cls, config: Config) -> int:
        """Number of accelerators per worker; 0 for external servers."""
        engine = config.engine
        return 0 if engine.url else engine.servers * engine.tensor_ranks

    @classmethod
    def check_placement(cls, config: Config) -> None:
        for key in PLACING_OPTIONS:
            if key in config.engine.server:
                refuse(
                    f"engine.server.{key}",
                    config.engine.server[key],
                    "places a server, which `april run` does itself",
                    "leave it out, or start workers with `april worker`",
                )

    @classmethod
    def engine_names(cls, config: Config, worker: str) -> list[str]:
        servers = len(config.engine.url) or config.engine.servers
        return [f"{worker}-server-{index}" for index in range(servers)] if servers > 1 else [worker]

    @classmethod
    def weight_channels(cls, config: Config, worker: str) -> list[str]:
        """Names of the worker's weight channels: one, named like the worker. If the transport carries no weights, there
        is one for each server, since a trainer outside April then pauses and loads each server separately."""
        carries = TRANSPORTS.find(config.weights.transport).carries_weights
        return [worker] if carries else cls.engine_names(config, worker)

    @classmethod
    def broadcasts_to_servers(cls, config: Config) -> bool:
        return config.engine.weights == "broadcast"

    @classmethod
    def describe_channel(cls, config: Config) -> str:
        engine = config.engine
        if not cls.broadcasts_to_servers(config):
            return f"{super().describe_channel(config)}, which passes them on to its server ({engine.weights})"
        if engine.url:
            return "0 the learner, from 1 on the tensor-parallel ranks that its servers say they have"
        size = engine.servers * engine.tensor_ranks
        whose = f"{engine.servers} servers'" if engine.servers > 1 else "server's"
        ranks = f"1-{size} its {whose} tensor-parallel ranks" if size > 1 else "1 its server"
        return f"{1 + size} ranks: 0 the learner, {ranks}"

    @classmethod
    def weight_loaders(
        cls, config: Config, engine: Any, worker: str, make_source: "Callable[..., WeightSource]"
    ) -> "list[WeightLoader]":
        """One weight loader for each server of the worker. If `engine.weights` is "broadcast", the servers join the
        weight channel themselves, in place of the worker.

        `engine`: the worker's servers. `make_source`: function (name of a weight channel, its servers if they join it
        themselves or else None, function that says which servers are up, function that says whether they take adapters)
        -> where a loader gets its weights.
        """
        from april.workers.engines.sglang.channel import ServerWeightChannel, ServerWeightLoader
        from april.workers.engines.sglang.shared_weights import SharedWeights

        engines, channels = engine.engines, cls.weight_channels(config, worker)
        sources: Sequence[WeightSource]
        if len(channels) == len(engines):
            sources = [
                make_source(
                    channel,
                    ServerWeightChannel(each) if cls.broadcasts_to_servers(config) else None,
                    *(partial(getattr, each, name) for name in ("ready", "takes_adapters")),
                )
                for channel, each in zip(channels, engines, strict=True)
            ]
        else:
            group = ServerWeightChannel(*engines)
            joins = cls.broadcasts_to_servers(config)
            source = make_source(worker, group if joins else None, group.up, lambda: take_adapters(engines))
            ups = [partial(getattr, each, "ready") for each in engines]
            members = (lambda: group.members) if joins else None
            sources = SharedWeights(source, ups, config.engine.update_s / 2, members).shares
        checks = (cls.make_weight_check(config) for _ in engines)
        return [ServerWeightLoader(*each) for each in zip(engines, sources, checks, strict=False)]

    @classmethod
    def check(cls, config: Config) -> None:
        engine, tensor_parallel = config.engine, cls.tensor_parallel
        if engine.pause != "abort" and engine.stream_tokens != 1:
            refuse(
                "engine.pause",
                engine.pause,
                "leaves tokens unsent when weights change, whose version would be unknown",
                "set engine.stream_tokens = 1, or use engine.pause = 'abort'",
            )
        if cls.broadcasts_to_servers(config) and config.weights.delta != "off":
            refuse(
                "weights.delta",
                config.weights.delta,
                "needs workers that keep the last version; with engine.weights = 'broadcast' servers get each whole",
                "leave it out, or set engine.weights = 'tensor'",
            )
        for key, spelled in (("pp_size", "pipeline_parallel_size"), ("dp_size", "data_parallel_size")):
            value = engine.server.get(key, engine.server.get(spelled, 1))
            if value != 1:
                refuse(
                    f"engine.server.{key}",
                    value,
                    "cannot be: new weights go only into tensor-parallel ranks",
                    f"use {tensor_parallel}, and one worker for each replica",
                )
        ranks = engine.tensor_ranks
        if not isinstance(ranks, int) or ranks < 1:
            refuse(f"engine.server.{tensor_parallel}", ranks, "is no number of ranks", "use 1 or more")
        if heads := config.attention_heads:
            query, shared = heads
            if query % ranks or (shared % ranks and ranks % shared):
                refuse(
                    f"engine.server.{tensor_parallel}",
                    ranks,
                    f"cannot split the model's {query} heads and {shared} key-value heads evenly",
                    f"use a divisor of {query}",
                )
        check_servers(engine)


def take_adapters(engines: "Sequence[SGLangEngine]") -> bool:
    """Whether all servers that are up accept adapters in place of complete weights."""
    return all(engine.takes_adapters for engine in engines if engine.ready)


class SGLangEntry(ServerEntry):
    returns_supports = True
    takes_images = True
    limits_memory = True
    shares_time = True

    @classmethod
    def memory_options(cls, config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> MemoryShare:
        return memory_share(config, total_bytes, free_bytes, weight_bytes)

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "SGLangFleet":
        from april.workers.engines.sglang.factory import make_sglang_engine

        return make_sglang_engine(config, device, name)

    @classmethod
    def check(cls, config: Config) -> None:
        check_cut(config)
        if config.engine.url and not config.learner.freeze_vision:
            refuse(
                "learner.freeze_vision",
                False,
                f"cannot be with {config.engine.url[0]}, a server that may keep images as seen by earlier weights",
                "leave it out, or have April start the servers",
            )
        super().check(config)


def check_cut(config: Config) -> None:
    """Raise ConfigError for top-k, top-p or min-p together with options under which SGLang does not return each token's
    support (the ids it was drawn from)."""
    sampling, server = config.sampling, config.engine.server
    if sampling.is_cut and (algorithm := server.get("speculative_algorithm")):
        refuse(
            "engine.server.speculative_algorithm",
            algorithm,
            f"cannot be with sampling.top_k = {sampling.top_k}: SGLang does not say what tokens of a draft "
            "were drawn from",
            "leave one out",
        )
    if sampling.min_p and server.get("enable_deterministic_inference"):
        refuse(
            "sampling.min_p",
            sampling.min_p,
            "cannot be with engine.server.enable_deterministic_inference, under which SGLang does not do it",
            "use sampling.top_p, or leave one out",
        )


def check_servers(engine: EngineSection) -> None:
    """Raise ConfigError for invalid addresses of servers, and for options of servers that April does not start."""
    for url in engine.url:
        if not re.fullmatch(r"https?://[^/\s:]+(:\d+)?", url.rstrip("/")):
            refuse("engine.url", url, "is no address", "give the server's as http://HOST:PORT, several with commas")
    if len({url.rstrip("/") for url in engine.url}) < len(engine.url):
        refuse(
            "engine.url",
            ",".join(engine.url),
            "names a server twice, whose weights would be loaded twice over",
            "name each once",
        )
    if engine.url and engine.server:
        refuse(
            "engine.server",
            engine.server,
            f"cannot be passed to the server at {engine.url[0]}, which is not started here",
            "leave it out",
        )
    if engine.url and engine.servers > 1:
        refuse(
            "engine.servers",
            engine.servers,
            f"starts servers, but engine.url = {','.join(engine.url)!r} names those that there are",
            "leave one of them out",
        )
    if engine.port and engine.port + engine.servers > 65536:
        refuse(
            "engine.port",
            engine.port,
            f"leaves no ports for {engine.servers} servers behind it",
            "lower it, or use 0 for any that are free",
        )


# --- memory share -----------------------------------------------------------------------------------------------------

MEMORY_OPTION = "mem_fraction_static"
GIB, MIB = 1 << 30, 1 << 20
CONTEXT_BYTES = GIB
"""Memory of the CUDA context, its kernels and communication buffers."""
PREFILL_CHUNKS = ((20, 2048), (60, 4096), (160, 8192), (math.inf, 16384))
"""SGLang's default prefill chunks: pairs (limit in GiB, tokens). An accelerator whose memory is below the limit gets
chunks of so many tokens; the first pair that fits counts."""
CHUNK_TOKEN_BYTES, LEAST_CHUNK = 1.5 * MIB, 2048
GRAPH_BYTES, SMALL_GIB, LARGE_BYTES = 512 * MIB, 60, 10 * GIB
"""CUDA graphs of up to 256 requests take GRAPH_BYTES. On accelerators with more memory than SMALL_GIB (GiB), SGLang
reserves at least LARGE_BYTES besides weights and cache."""


def memory_share(config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> MemoryShare:
    """The SGLang option that sets the server's share of the accelerator's memory, and the bytes that are then left for
    the KV cache, as `EngineEntry.memory_options` returns them. `free_bytes`: memory that the server may take of the
    `total_bytes`; `weight_bytes`: size of the weights. A share that the configuration sets is kept."""
    available = free_bytes - CONTEXT_BYTES - other_bytes(config, total_bytes)
    fraction = float(config.engine.server.get(MEMORY_OPTION) or math.floor(1000 * available / total_bytes) / 1000)
    return MemoryShare({MEMORY_OPTION: fraction}, total_bytes * fraction - weight_bytes)


def other_bytes(config: Config, total_bytes: float) -> float:
    """Estimate of the bytes that the server needs besides weights and KV cache, on an accelerator with
    `total_bytes`."""
    server, total_gib = config.engine.server, total_bytes / GIB
    usual = next(tokens for below, tokens in PREFILL_CHUNKS if total_gib < below)
    chunk = int(server.get("chunked_prefill_size", usual))
    activations = 512 * MIB + CHUNK_TOKEN_BYTES * max(chunk, LEAST_CHUNK)
    estimate = activations + GRAPH_BYTES + config.engine.tensor_ranks * GIB / 8
    return max(estimate, LARGE_BYTES) if total_gib > SMALL_GIB else estimate
