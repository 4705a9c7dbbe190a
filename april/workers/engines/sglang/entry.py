"""What April asks about SGLang's servers, and about others that are driven like them; see `EngineEntry`."""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from april.config import Config, ConfigError, EngineSection
from april.workers.engines.entry import EngineEntry, Share

if TYPE_CHECKING:
    from april.weights.receiver import WeightReceiver
    from april.workers.engines.intake import Intake
    from april.workers.engines.sglang.fleet import SGLangFleet

PLACING_OPTIONS = ("base_gpu_id", "gpu_id_step")
"""of a server, which would count on from the devices of its worker"""


class ServerEntry(EngineEntry):
    """Of an engine on servers that speak SGLang's HTTP API."""

    in_process = False
    keeps_prefixes = True
    adopts = True
    scores = True
    reads = tuple(EngineSection.model_fields.keys() - {"pace", "pace_factor"})
    tensor_parallel: ClassVar[str] = "tp_size"
    """the server's option for its tensor-parallel ranks"""
    package: ClassVar[tuple[str, ...]] = ("SGLang", "sglang")
    """the server's name, and those of the packages that have it"""

    @classmethod
    def installed(cls, config: Config) -> str:
        from april.workers.engines.sglang.installed import installed_server

        name, *packages = cls.package
        return "servers that others keep" if config.engine.url else installed_server(config, name, tuple(packages))

    @classmethod
    def devices(cls, config: Config) -> int:
        """A worker on servers that others keep takes none."""
        engine = config.engine
        return 0 if engine.url else engine.servers * engine.tensor_ranks

    @classmethod
    def check_placement(cls, config: Config) -> None:
        for key in PLACING_OPTIONS:
            if key in config.engine.server:
                raise ConfigError(
                    f"key 'engine.server.{key}' = {config.engine.server[key]!r} places a server, which `april run` "
                    "does itself; leave it out, or start workers with `april worker`"
                )

    @classmethod
    def lanes(cls, config: Config, worker: str) -> list[str]:
        """Its own, or one for each of several servers behind it."""
        servers = len(config.engine.url) or config.engine.servers
        return [f"{worker}-server-{index}" for index in range(servers)] if servers > 1 else [worker]

    @classmethod
    def broadcasts_to_servers(cls, config: Config) -> bool:
        return config.engine.weights == "broadcast"

    @classmethod
    def describe_lane(cls, config: Config) -> str:
        engine = config.engine
        if not cls.broadcasts_to_servers(config):
            return f"{super().describe_lane(config)}, which passes them on to its server ({engine.weights})"
        if engine.url:
            return "1 + tp_size ranks: 0 the learner, from 1 on the tensor-parallel ranks that its server says it has"
        size = engine.tensor_ranks
        ranks = f"1-{size} its server's tensor-parallel ranks 0-{size - 1}" if size > 1 else "1 its server"
        return f"{1 + size} ranks: 0 the learner, {ranks}"

    @classmethod
    def intakes(
        cls, config: Config, engine: Any, worker: str, make_receiver: "Callable[..., WeightReceiver]"
    ) -> "list[Intake]":
        """One for each server; one that the learner broadcasts to takes the worker's place in its lane."""
        from april.workers.engines.sglang.intake import ServerIntake
        from april.workers.engines.sglang.lane import ServerLane

        intakes: list[Intake] = []
        for lane, part in zip(cls.lanes(config, worker), engine.parts, strict=True):
            server = ServerLane(part) if cls.broadcasts_to_servers(config) else None
            up, adapts = (partial(getattr, part, name) for name in ("ready", "takes_adapters"))
            intakes.append(ServerIntake(part, make_receiver(lane, server, up, adapts), cls.make_proof(config)))
        return intakes

    @classmethod
    def check(cls, config: Config) -> None:
        engine, tensor_parallel = config.engine, cls.tensor_parallel
        if engine.pause != "abort" and engine.stream_tokens != 1:
            raise ConfigError(
                f"key 'engine.pause' = {engine.pause!r} leaves tokens unsent when weights change, whose version would "
                "be unknown; set engine.stream_tokens = 1, or use engine.pause = 'abort'"
            )
        for key, spelled in (("pp_size", "pipeline_parallel_size"), ("dp_size", "data_parallel_size")):
            value = engine.server.get(key, engine.server.get(spelled, 1))
            if value != 1:
                raise ConfigError(
                    f"key 'engine.server.{key}' = {value!r} cannot be: new weights go only into tensor-parallel ranks; "
                    f"use {tensor_parallel}, and one worker for each replica"
                )
        ranks = engine.tensor_ranks
        if not isinstance(ranks, int) or ranks < 1:
            raise ConfigError(f"key 'engine.server.{tensor_parallel}' = {ranks!r} is no number of ranks; use 1 or more")
        if heads := config.attention_heads:
            query, shared = heads
            if query % ranks or (shared % ranks and ranks % shared):
                raise ConfigError(
                    f"key 'engine.server.{tensor_parallel}' = {ranks} cannot split the model's {query} heads and "
                    f"{shared} key-value heads evenly; use a divisor of {query}"
                )
        check_servers(engine)


class SGLangEntry(ServerEntry):
    returns_supports = True
    divides_memory = True
    takes_turns = True

    @classmethod
    def memory_options(cls, config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> Share:
        from april.workers.engines.sglang.memory import share

        return share(config, total_bytes, free_bytes, weight_bytes)

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "SGLangFleet":
        from april.workers.engines.sglang.factory import make_sglang_engine

        return make_sglang_engine(config, device, name)

    @classmethod
    def check(cls, config: Config) -> None:
        check_cut(config)
        super().check(config)


def check_cut(config: Config) -> None:
    """Refuse a cut of the distribution beside what keeps a server from saying what is left of it."""
    sampling, server = config.sampling, config.engine.server
    if sampling.is_cut and (algorithm := server.get("speculative_algorithm")):
        raise ConfigError(
            f"key 'engine.server.speculative_algorithm' = {algorithm!r} cannot be with sampling.top_k = "
            f"{sampling.top_k}: SGLang does not say what tokens of a draft were drawn from; leave one out"
        )
    if sampling.min_p and server.get("enable_deterministic_inference"):
        raise ConfigError(
            f"key 'sampling.min_p' = {sampling.min_p} cannot be with engine.server.enable_deterministic_inference, "
            "under which SGLang does not do it; use sampling.top_p, or leave one out"
        )


def check_servers(engine: EngineSection) -> None:
    """Refuse addresses that are none, and what is said of servers that others have started."""
    for url in engine.url:
        if not re.fullmatch(r"https?://[^/\s:]+(:\d+)?", url.rstrip("/")):
            raise ConfigError(
                f"key 'engine.url' = {url!r} is no address; give the server's as http://HOST:PORT, several with commas"
            )
    if len({url.rstrip("/") for url in engine.url}) < len(engine.url):
        raise ConfigError(
            f"key 'engine.url' = {','.join(engine.url)!r} names a server twice, whose weights would be loaded twice "
            "over; name each once"
        )
    if engine.url and engine.server:
        raise ConfigError(
            f"key 'engine.server' = {engine.server!r} cannot be passed to the server at {engine.url[0]}, which is not "
            "started here; leave it out"
        )
    if engine.url and engine.servers > 1:
        raise ConfigError(
            f"key 'engine.servers' = {engine.servers} starts servers, but engine.url = {','.join(engine.url)!r} names "
            "those that there are; leave one of them out"
        )
    if engine.port and engine.port + engine.servers > 65536:
        raise ConfigError(
            f"key 'engine.port' = {engine.port} leaves no ports for {engine.servers} servers behind it; lower it, or "
            "use 0 for any that are free"
        )
