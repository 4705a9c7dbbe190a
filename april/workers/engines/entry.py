"""What April asks about an engine before there is one: what it needs, what it can do, how it is built.

An entry is a class, named in `worker.engine`. It may be the engine itself. Where the engine needs a package that not
every part of a run has, the entry is a small class beside it, which imports the engine when it is built. What an entry
leaves out has the answers below: those of an engine that computes in the worker's own process.
"""

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from april.config import Config, ConfigError, EngineSection

if TYPE_CHECKING:
    from april.weights.receiver import WeightReceiver
    from april.workers.engines.base import Engine
    from april.workers.engines.intake import Intake
    from april.workers.engines.proof import Proof

log = logging.getLogger(__name__)


class Share(NamedTuple):
    """What an engine may take of an accelerator's memory."""

    options: dict[str, Any]
    """of its server, `engine.server`"""
    cache_bytes: float
    """left for its KV cache"""


class EngineEntry:
    in_process: ClassVar[bool] = True
    """it computes in the worker's own thread; otherwise servers do, which it waits for"""
    keeps_prefixes: ClassVar[bool] = False
    """what comes back after an abort still has its context in the cache, as long as the weights are the same"""
    returns_supports: ClassVar[bool] = False
    """where `top_k`, `top_p` or `min_p` cut the distribution, it says which ids each token was drawn from"""
    cuts: ClassVar[bool] = True
    """it draws from what `top_k` and `top_p` leave; otherwise it refuses a request for that"""
    true_distribution: ClassVar[bool] = True
    """tokens are drawn from the model's distribution; otherwise they are good for tests alone"""
    adopts: ClassVar[bool] = False
    """others may load its weights into it, and it goes on under the name that April gives them"""
    scores: ClassVar[bool] = False
    """it says the log-probabilities of a given text, by which it is seen that it holds the weights it was sent"""
    divides_memory: ClassVar[bool] = False
    """it can be told how much of an accelerator's memory it may take, see `memory_options`"""
    takes_turns: ClassVar[bool] = False
    """it can let go of the accelerator's memory, and take it again: `release` and `resume`"""
    gives_way: ClassVar[bool] = True
    """the learner and the broker have this machine's processor before it; not if it keeps a clock"""
    reads: ClassVar[Collection[str]] = ()
    """keys of [engine] that mean something to it; the others are refused"""

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "Engine":
        """The engine of worker `name`, on "cpu" or "cuda". Raises ConfigError."""
        raise NotImplementedError(f"{cls.__name__} has no from_config(config, device, name)")

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse what it cannot do, or cannot do rightly, before anything is started. Raises ConfigError."""
        default = EngineSection()
        for key in EngineSection.model_fields.keys() - set(cls.reads):
            if (value := getattr(config.engine, key)) != getattr(default, key):
                raise ConfigError(
                    f"key 'engine.{key}' = {value!r} means nothing to worker.engine = {config.worker.engine!r}; "
                    "leave it out"
                )

    @classmethod
    def installed(cls, config: Config) -> str:
        """What it is made of here, with the version; empty where there is nothing to say. Raises ConfigError where
        that is not installed."""
        return ""

    @classmethod
    def devices(cls, config: Config) -> int:
        """Accelerators that each worker takes, where it is to run on any."""
        return 1

    @classmethod
    def check_placement(cls, config: Config) -> None:
        """Refuse what contradicts a placement of its accelerators by `april run`. Raises ConfigError."""

    @classmethod
    def memory_options(cls, config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> Share:
        """What bounds an engine that may have `free_bytes` of an accelerator of `total_bytes`, and needs `weight_bytes`
        of them for its weights. Asked where it `divides_memory`. Raises ConfigError where it cannot run in that."""
        raise NotImplementedError(f"{cls.__name__} has no memory_options(config, total, free, weights)")

    @classmethod
    def lanes(cls, config: Config, worker: str) -> list[str]:
        """Names of a worker's lanes, over which the learner sends it weights."""
        return [worker]

    @classmethod
    def broadcasts_to_servers(cls, config: Config) -> bool:
        """Whether its servers take the worker's place in its lanes."""
        return False

    @classmethod
    def takes_adapters(cls, config: Config) -> bool:
        """Whether an engine keeps the model's own weights and takes an adapter beside them, as `AdapterTaker`.
        Otherwise its worker makes weights of both for it."""
        return False

    @classmethod
    def describe_lane(cls, config: Config) -> str:
        """Which ranks meet in a lane."""
        return "2 ranks: 0 the learner, 1 the worker"

    @classmethod
    def intakes(
        cls, config: Config, engine: Any, worker: str, make_receiver: "Callable[..., WeightReceiver]"
    ) -> "list[Intake]":
        """What loads the weights that arrive into `engine`, which `from_config` made, one for each lane;
        `make_receiver(lane, server, up, adapts)` as of `WeightReceiver`."""
        from april.workers.engines.intake import Intake

        receiver = make_receiver(worker, adapts=lambda: cls.takes_adapters(config))
        return [Intake(engine, receiver, cls.make_proof(config))]

    @classmethod
    def make_proof(cls, config: Config) -> "Proof | None":
        """What finds out whether one of its engines holds what it was sent; None where that is not looked at."""
        from april.workers.engines.proof import Proof

        if config.weights.canary and not cls.scores:
            log.warning(
                "worker.engine = %r does not score texts: that it samples from the weights it is sent is not proven",
                config.worker.engine,
            )
        return Proof() if cls.scores and config.weights.canary else None
