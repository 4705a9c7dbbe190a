"""Registry entries of engines: what an engine needs, what it supports, and how it is built.

An entry is a class, named in `worker.engine`. It may be the engine class itself. If the engine needs packages that not
every process of a run has, the entry is a small separate class, which imports the engine when it builds it. The
defaults below are those of an engine that computes in the worker's own process.
"""

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from april.config import Config, EngineSection
from april.errors import refuse

if TYPE_CHECKING:
    from april.weights.receiver import WeightReceiver
    from april.workers.engines.base import Engine
    from april.workers.engines.intake import WeightLoader
    from april.workers.engines.proof import WeightCheck

log = logging.getLogger(__name__)


class MemoryShare(NamedTuple):
    """An engine's share of an accelerator's memory."""

    options: dict[str, Any]
    """Options of `engine.server` that limit the server to its share."""
    cache_bytes: float
    """Bytes left for the KV cache."""


class EngineEntry:
    """Declares an engine to April; subclass it and override what differs."""

    in_process: ClassVar[bool] = True
    """Whether the engine computes in the worker's thread; False if servers do."""
    keeps_prefixes: ClassVar[bool] = False
    """Whether a resumed sample finds its context still cached, as long as the weights have not changed."""
    returns_supports: ClassVar[bool] = False
    """Whether the engine can return the token ids that each token was drawn from (`Request.with_support`)."""
    truncates_sampling: ClassVar[bool] = True
    """Whether the engine supports `top_k` and `top_p`; if not, it refuses requests that set them."""
    true_distribution: ClassVar[bool] = True
    """Whether tokens are drawn from the model's distribution; False only for engines made for tests."""
    accepts_external_weights: ClassVar[bool] = False
    """Whether a process outside April may load weights into the engine, which then takes the version April names."""
    scores: ClassVar[bool] = False
    """Whether `Engine.score` works; the weight check needs it."""
    limits_memory: ClassVar[bool] = False
    """Whether the engine's accelerator memory can be limited, see `memory_options`."""
    shares_time: ClassVar[bool] = False
    """Whether the engine can release and reacquire the accelerator's memory, see `TimeSharingEngine`."""
    yields_cpu: ClassVar[bool] = True
    """Whether the worker lowers its CPU priority below learner and broker; False for an engine that keeps real time."""
    reads: ClassVar[Collection[str]] = ()
    """Keys of [engine] that the engine reads; other keys that are set are refused."""

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "Engine":
        """Build the engine of worker `name` on `device`, "cpu" or "cuda". Raises ConfigError."""
        raise NotImplementedError(f"{cls.__name__} has no from_config(config, device, name)")

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError for a configuration that the engine does not support, before anything is started."""
        default = EngineSection()
        for key in EngineSection.model_fields.keys() - set(cls.reads):
            if (value := getattr(config.engine, key)) != getattr(default, key):
                refuse(
                    f"engine.{key}", value, f"means nothing to worker.engine = {config.worker.engine!r}", "leave it out"
                )

    @classmethod
    def installed(cls, config: Config) -> str:
        """Name and version of the software that the engine needs on this machine; empty if there is none.

        Raises ConfigError if it is not installed.
        """
        return ""

    @classmethod
    def devices(cls, config: Config) -> int:
        """Accelerators per worker, if workers run on accelerators."""
        return 1

    @classmethod
    def check_placement(cls, config: Config) -> None:
        """Raise ConfigError for options that contradict the placement of accelerators by `april run`."""

    @classmethod
    def memory_options(cls, config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> MemoryShare:
        """Options that limit the engine to `free_bytes` of an accelerator with `total_bytes`.

        `weight_bytes`: size of the weights. Called only if `limits_memory`. Raises ConfigError if the engine cannot run
        in so little memory.
        """
        raise NotImplementedError(f"{cls.__name__} has no memory_options(config, total, free, weights)")

    @classmethod
    def weight_channels(cls, config: Config, worker: str) -> list[str]:
        """Names of the weight channels over which the learner sends weights to a worker."""
        return [worker]

    @classmethod
    def broadcasts_to_servers(cls, config: Config) -> bool:
        """Whether the worker's servers, instead of the worker, receive the weights of its weight channels."""
        return False

    @classmethod
    def takes_adapters(cls, config: Config) -> bool:
        """Whether the engine loads adapters on top of the base weights, see `AdapterEngine`.

        If not, its worker merges adapter and base weights.
        """
        return False

    @classmethod
    def describe_channel(cls, config: Config) -> str:
        """The ranks of a weight channel, in words."""
        return "2 ranks: 0 the learner, 1 the worker"

    @classmethod
    def weight_loaders(
        cls, config: Config, engine: Any, worker: str, make_receiver: "Callable[..., WeightReceiver]"
    ) -> "list[WeightLoader]":
        """Weight loaders of `engine`, one for each weight channel.

        `engine`: as made by `from_config`. `make_receiver(channel, server, up, adapts)`: makes a `WeightReceiver`.
        """
        from april.workers.engines.intake import WeightLoader

        receiver = make_receiver(worker, adapts=lambda: cls.takes_adapters(config))
        return [WeightLoader(engine, receiver, cls.make_weight_check(config))]

    @classmethod
    def make_weight_check(cls, config: Config) -> "WeightCheck | None":
        """A new weight check for one engine; None if `weights.canary` is off or the engine does not score."""
        from april.workers.engines.proof import WeightCheck

        if config.weights.canary and not cls.scores:
            log.warning(
                "worker.engine = %r does not score texts: that it samples from the weights it is sent is not proven",
                config.worker.engine,
            )
        return WeightCheck() if cls.scores and config.weights.canary else None
