"""How learner and engine divide the memory of accelerators that they share: what the learner takes, by the model and
its micro-batches, and what is left to the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from april.config import Config, ConfigError
from april.config.checks import needs_values
from april.launch.adapter import adapter_parameters, whole_parameters
from april.launch.devices import memory_here
from april.launch.shape import WEIGHT_BYTES, Shape, read_shape
from april.words import size
from april.workers.engines import ENGINES

GIB = 1 << 30
KEPT_BYTES, TRAINED_BYTES = 4, 12
"""of a parameter in float32: its weight; and, where it is trained, its gradient and two moments of AdamW"""
HEAD_BYTES = 12
"""of a parameter of the head while it is used: in bfloat16 and its gradient, and that in float32, twice"""
LOGITS_BYTES = 256 << 20
"""of logits at a time, their logarithms, and what else a loss makes of them"""
CONTEXT_BYTES = GIB
"""of the CUDA context, libraries and what lies idle between tensors"""
LEFT_BYTES = 2 << 30
"""of a server that has let go: its context, and what its allocator keeps"""


@dataclass(frozen=True)
class Division:
    """Of one accelerator."""

    options: Mapping[str, Any]
    """of the engine, `engine.server`"""
    said: str


def states_bytes(config: Config, shape: Shape) -> float:
    """Weights, gradients and moments on each rank. Raises ConfigError for an adapter that does not fit the model."""
    kept = trained = shape.parameters
    if config.lora.is_set:
        trained = adapter_parameters(config)
        kept += trained - whole_parameters(config)
    if not config.lora.keeps_start and (config.algorithm.kl_coef or config.critic.kl_coef):
        kept += shape.parameters
    if needs_values(config.algorithm, imported=False):
        kept, trained = kept + shape.parameters, trained + shape.parameters
    return (kept * KEPT_BYTES + trained * TRAINED_BYTES) // config.learner.ranks


def activations_bytes(config: Config, shape: Shape) -> float:
    """Of a micro-batch, in bfloat16: what the backward pass needs of each layer, or of each layer its input and of one
    all, where activations are computed again."""
    learner, longest = config.learner, config.longest_prompt_tokens + config.sampling.max_response_tokens
    tokens = max(learner.microbatch_tokens, longest)
    each = shape.layers * shape.kept_bytes
    if learner.activation_checkpointing:
        each = shape.layers * 2 * shape.hidden + shape.kept_bytes
    return float(tokens * each * (2 if learner.compute == "fp32" else 1))


def divide(config: Config, shape: Shape, total_bytes: float) -> Division:
    """Raises ConfigError where the engine does not get what its weights and one response take."""
    states, activations = states_bytes(config, shape), activations_bytes(config, shape)
    head = shape.head * HEAD_BYTES + LOGITS_BYTES
    learner, ranks = states + activations + head + CONTEXT_BYTES, config.engine.tensor_ranks
    weights, longest = shape.parameters * WEIGHT_BYTES / ranks, config.longest_prompt_tokens
    longest += config.sampling.max_response_tokens
    turns = config.devices.turns
    meanwhile = CONTEXT_BYTES if turns else learner
    share = ENGINES.find(config.worker.engine).memory_options(config, total_bytes, total_bytes - meanwhile, weights)
    tokens = int(share.cache_bytes // (shape.kv_bytes / ranks))
    takes = (
        f"the learner takes about {size(learner)} ({size(states)} of weights, gradients and moments, "
        f"{size(activations)} of activations, {size(head)} of logits and the head)"
    )
    if tokens < longest or (turns and learner + LEFT_BYTES > total_bytes):
        raise ConfigError(
            f"key 'devices.share' = true does not suffice with {size(total_bytes)} an accelerator: {takes}, and the "
            f"engine needs {size(weights)} of weights and a cache of {longest} tokens at least; set "
            "learner.activation_checkpointing = true, lower learner.microbatch_tokens, shorten responses, take a "
            "smaller model, or set lora.rank"
        )
    given = ", ".join(f"engine.server.{key} = {value}" for key, value in share.options.items())
    beside = total_bytes - meanwhile - weights - share.cache_bytes
    return Division(
        share.options,
        f"{size(total_bytes)} of each accelerator{', in turns' * turns}: {takes};\n{given}: {size(weights)} of weights "
        f"and a cache of {tokens} tokens, {size(beside)} left for what the server takes beside them",
    )


def division_of(config: Config, devices: Sequence[str]) -> Division | None:
    """Of accelerators that parts share, `devices` by name; None where they share none. Raises ConfigError."""
    section, shape = config.devices, read_shape(config.model.path)
    if not section.share:
        return None
    if shape is None:
        raise ConfigError(
            f"key 'devices.share' = true divides memory by the model's size, which {config.model.path} does not say; "
            "use accelerators of their own"
        )
    totals = [section.memory_gib * GIB] if section.memory_gib else memory_here() if devices else []
    if not totals:
        return Division({}, "divided once accelerators are here; devices.memory_gib foretells how")
    return divide(config, shape, min(totals))


def bounded(config: Config, devices: Sequence[str]) -> Config:
    """With what bounds the engines, where they share accelerators. Raises ConfigError."""
    division = division_of(config, devices) if devices else None
    if division is None:
        return config
    server = config.engine.server | dict(division.options)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"server": server})})
