"""Registry entries of engines: what an engine needs, what it supports, and how it is built.

An entry is a class, named in `worker.engine`. It may be the engine class itself. If the engine needs packages that not
every process of a run has, the entry is a small separate class, which imports the engine when it builds it. The
defaults below are those of an engine that computes in the worker's own process. Engines share the checks at the end.
"""

import json
import logging
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from april.config import Config, EngineSection
from april.util.errors import refuse
from april.util.files import weight_files
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request

if TYPE_CHECKING:
    import torch

    from april.weights.source import WeightSource
    from april.workers.engines.base import Engine
    from april.workers.engines.weight_loading import WeightCheck, WeightLoader


log = logging.getLogger(__name__)


class MemoryShare(NamedTuple):
    """An engine's share of an accelerator's memory."""

    options: dict[str, Any]
    """Options of `engine.server` that limit the engine to its share."""
    cache_bytes: float
    """Bytes of the share that are left for the KV cache."""


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
    """Whether a process outside April may load weights into the engine, which then reports the policy version that
    April gives to them."""
    scores: ClassVar[bool] = False
    """Whether `Engine.score` works; the weight check needs it."""
    takes_images: ClassVar[bool] = False
    """Whether the engine generates from images (`Request.images`), with a model that does."""
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
    def check_model(cls, config: Config) -> None:
        """Raises ConfigError for a model that the engine cannot run, and NotTried if it cannot be found out whether the
        engine can. It may import torch, so before a run it is called in a process of its own."""

    @classmethod
    def installed(cls, config: Config) -> str:
        """Name and version of the software that the engine needs on this machine; empty if it needs none.

        Raises ConfigError if it is not installed.
        """
        return ""

    @classmethod
    def devices(cls, config: Config) -> int:
        """Number of accelerators that each worker takes, if workers run on accelerators."""
        return 1

    @classmethod
    def check_placement(cls, config: Config) -> None:
        """Raise ConfigError for options that contradict the placement of accelerators by `april run`."""

    @classmethod
    def memory_options(cls, config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> MemoryShare:
        """The options of `engine.server` that limit the engine to `free_bytes` of an accelerator with `total_bytes`,
        and the bytes that are then left for the KV cache.

        `weight_bytes`: size of the weights. Called only if `limits_memory` is True. Raises ConfigError if the engine
        cannot run in so little memory.
        """
        raise NotImplementedError(f"{cls.__name__} has no memory_options(config, total, free, weights)")

    @classmethod
    def engine_names(cls, config: Config, worker: str) -> list[str]:
        """Names of a worker's engines: its own or, with several servers, one for each."""
        return [worker]

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
        """A text for people that says which process is which rank of a weight channel's process group."""
        return "2 ranks: 0 the learner, 1 the worker"

    @classmethod
    def weight_loaders(
        cls, config: Config, engine: Any, worker: str, make_source: "Callable[..., WeightSource]"
    ) -> "list[WeightLoader]":
        """Weight loaders of `engine`, one for each of its servers; one for an engine without servers.

        `engine`: as made by `from_config`. `make_source(channel, server, up, adapts)`: makes the `WeightSource` of the
        weight channel with the name `channel`. `server`: the `InferenceServer` that receives the weights itself, None
        if the worker does. `up()`: whether the engine can load weights now. `adapts()`: whether it takes adapters.
        """
        from april.workers.engines.weight_loading import WeightLoader

        receiver = make_source(worker, adapts=lambda: cls.takes_adapters(config))
        return [WeightLoader(engine, receiver, cls.make_weight_check(config))]

    @classmethod
    def make_weight_check(cls, config: Config) -> "WeightCheck | None":
        """A new `WeightCheck` for one engine, which compares log-probabilities of a fixed text, the canary, between
        engine and learner. None if `weights.canary` is off or the engine does not score texts."""
        from april.workers.engines.weight_loading import WeightCheck

        if config.weights.canary and not cls.scores:
            log.warning(
                "worker.engine = %r does not score texts: that it samples from the weights it is sent is not proven",
                config.worker.engine,
            )
        return WeightCheck() if cls.scores and config.weights.canary else None


# --- devices ----------------------------------------------------------------------------------------------------------


def devices_wanted(config: Config) -> tuple[int, int]:
    """(number of accelerators of the learner, number of accelerators of one worker). The device `auto` counts as an
    accelerator."""
    per_worker = ENGINES.find(config.worker.engine).devices(config) if config.worker.device != "cpu" else 0
    return config.learner.ranks if config.learner.device != "cpu" else 0, per_worker


def device_of(config: Config) -> str:
    """Device of a worker's engine on this machine, "cuda" or "cpu". Raises ConfigError."""
    import torch

    device = config.worker.device if devices_wanted(config)[1] else "cpu"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        refuse("worker.device", "cuda", "finds no accelerator here", "use 'auto' or 'cpu'")
    return device


# --- checks of requests and weights -----------------------------------------------------------------------------------

OUTPUT_TENSOR, EMBEDDING_TENSOR = "lm_head.weight", "model.embed_tokens.weight"


def check_request(
    request: Request, vocabulary: int, max_context: int, live: Container[int], entry: "type[EngineEntry] | None" = None
) -> None:
    """Raise EngineError for a request that can never run, or that needs a feature which `entry` does not declare (None:
    features are not checked). `vocabulary`: number of token ids. `max_context`: most tokens of prompt and response.
    `live`: ids of the requests that run or are queued."""
    name, tokens = f"request {request.id}", np.asarray(request.tokens)
    if request.id in live:
        raise EngineError(f"{name} is live already; cancel it or use another id")
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu":
        raise EngineError(f"{name} has no tokens; give a one-dimensional integer array with at least one")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise EngineError(
            f"{name} has token ids from {tokens.min()} to {tokens.max()}; "
            f"the model's vocabulary is 0 to {vocabulary - 1}"
        )
    if request.max_new_tokens < 1:
        raise EngineError(f"{name} has max_new_tokens = {request.max_new_tokens}; at least 1 is needed")
    if len(tokens) + request.max_new_tokens > max_context:
        raise EngineError(
            f"{name} needs {len(tokens)} + {request.max_new_tokens} tokens but max_context = {max_context}; "
            "shorten it or raise max_context"
        )
    if not (0 <= request.temperature < float("inf") and 0 < request.top_p <= 1 and request.top_k >= 0):
        raise EngineError(
            f"{name} has temperature = {request.temperature}, top_p = {request.top_p}, top_k = {request.top_k}; "
            "temperature and top_k are at least 0, top_p above 0 and at most 1"
        )
    if not 0 <= request.min_p < 1:
        raise EngineError(f"{name} has min_p = {request.min_p}; it is at least 0 and below 1")
    if entry and not entry.returns_supports and (request.with_support or request.min_p):
        raise EngineError(
            f"{name} has with_support = {request.with_support}, min_p = {request.min_p}, and the engine does not "
            "return the ids that a token was drawn from; use False and 0"
        )
    if entry and not entry.truncates_sampling and (request.top_k or request.top_p != 1):
        raise EngineError(
            f"{name} has top_k = {request.top_k}, top_p = {request.top_p}, and the engine does not cut the "
            "distribution; use 0 and 1"
        )


def folder_tensors(folder: Path) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Tensor shapes of a Hugging Face folder by name, and whether its output projection is tied to the embedding."""
    from safetensors import safe_open

    files = weight_files(folder)
    if not files:
        raise EngineError(f"{folder} holds no .safetensors file; save the model with save_pretrained")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    tied = OUTPUT_TENSOR not in shapes or json.loads((folder / "config.json").read_text()).get(
        "tie_word_embeddings", False
    )
    if tied:
        shapes.pop(OUTPUT_TENSOR, None)
    return shapes, tied


def check_heads(expected: Mapping[str, tuple[int, ...]], tied: bool, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise EngineError unless the names and shapes of tensors are exactly the `expected` ones.

    `tied`: the output projection is tied to the embedding, and may be present or not.
    """
    missing = sorted(expected.keys() - shapes.keys())
    allowed = dict(expected) | (
        {OUTPUT_TENSOR: expected[EMBEDDING_TENSOR]} if tied and EMBEDDING_TENSOR in expected else {}
    )
    extra = sorted(shapes.keys() - allowed.keys())
    if missing or extra:
        kind, names = ("lack", missing) if missing else ("have an unknown", extra)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise EngineError(
            f"the weights {kind} tensor {names[0]!r}{more}; send exactly the tensors that config.json describes"
        )
    for name, shape in shapes.items():
        if tuple(shape) != allowed[name]:
            raise EngineError(
                f"tensor {name!r} has shape {tuple(shape)} but config.json describes {allowed[name]}; "
                "send the weights of the same model"
            )


def check_tensors(expected: Mapping[str, tuple[int, ...]], tied: bool, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raise EngineError unless the tensors have exactly the `expected` names and shapes, and all values are finite.
    `tied`: the output projection is tied to the embedding, and may be present or not."""
    check_heads(expected, tied, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise EngineError(f"tensor {name!r} has values that are not finite; the learner must not publish it")


def is_finite(tensor: "torch.Tensor") -> bool:
    """Whether all values are finite, by their extremes: `isfinite` takes 20 times as long for bfloat16 on a CPU."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())
