"""Divides the memory of shared accelerators: estimates what the learner needs from the model and its micro-batches, and
gives the rest to the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from april.config import Config
from april.config.checks import needs_values
from april.errors import refuse
from april.launch.adapter import adapter_parameters, whole_parameters
from april.launch.devices import memory_here
from april.launch.shape import WEIGHT_BYTES, ModelShape, read_shape
from april.words import format_bytes
from april.workers.engines import ENGINES

GIB = 1 << 30
KEPT_BYTES, TRAINED_BYTES = 4, 12
"""float32 bytes per parameter: its weight; and, if it is trained, its gradient and two AdamW moments."""
HEAD_BYTES = 12
"""Temporary bytes per parameter of the output head: bfloat16 weight and gradient, and two float32 copies of the
gradient."""
LOGITS_BYTES = 256 << 20
"""Memory of one block of logits, their log-probabilities, and the loss's temporaries."""
CONTEXT_BYTES = GIB
"""Memory of the CUDA context, its libraries, and fragmentation."""
MAX_AGENT_STATE_BYTES = 2 << 30
"""Memory that a server keeps after it has released weights and cache: its context and its allocator's reserve."""


@dataclass(frozen=True)
class MemoryPlan:
    """Division of the memory of one shared accelerator."""

    options: Mapping[str, Any]
    """Options for `engine.server` that limit the engine's memory."""
    description: str


def states_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of weights, gradients and moments per rank. Raises ConfigError for an adapter that does not fit the
    model."""
    resident = trained = shape.parameters
    if config.lora.is_set:
        trained = adapter_parameters(config)
        resident += trained - whole_parameters(config)
    if not config.lora.base_is_frozen and (config.algorithm.kl_coef or config.critic.kl_coef):
        resident += shape.parameters
    if needs_values(config.algorithm, imported=False):
        resident, trained = resident + shape.parameters, trained + shape.parameters
    return (resident * KEPT_BYTES + trained * TRAINED_BYTES) // config.learner.ranks


def activations_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of a micro-batch's activations: those of all layers, or with activation checkpointing every layer's input
    and one layer's activations."""
    learner, longest = config.learner, config.longest_prompt_tokens + config.sampling.max_response_tokens
    tokens = max(learner.microbatch_tokens, longest)
    each = shape.layers * shape.kept_bytes
    if learner.activation_checkpointing:
        each = shape.layers * 2 * shape.hidden + shape.kept_bytes
    return float(tokens * each * (2 if learner.compute == "fp32" else 1))


def divide(config: Config, shape: ModelShape, total_bytes: float) -> MemoryPlan:
    """Plan for an accelerator of `total_bytes`. Raises ConfigError if the rest is too small for weights and one
    response."""
    states, activations = states_bytes(config, shape), activations_bytes(config, shape)
    head = shape.head * HEAD_BYTES + LOGITS_BYTES
    learner, ranks = states + activations + head + CONTEXT_BYTES, config.engine.tensor_ranks
    weights, longest = shape.parameters * WEIGHT_BYTES / ranks, config.longest_prompt_tokens
    longest += config.sampling.max_response_tokens
    time_sharing = config.devices.turns
    learner_share = CONTEXT_BYTES if time_sharing else learner
    share = ENGINES.find(config.worker.engine).memory_options(config, total_bytes, total_bytes - learner_share, weights)
    tokens = int(share.cache_bytes // (shape.kv_bytes / ranks))
    takes = (
        f"the learner takes about {format_bytes(learner)} ({format_bytes(states)} of weights, gradients and moments, "
        f"{format_bytes(activations)} of activations, {format_bytes(head)} of logits and the head)"
    )
    if tokens < longest or (time_sharing and learner + MAX_AGENT_STATE_BYTES > total_bytes):
        refuse(
            "devices.share",
            True,
            f"does not suffice with {format_bytes(total_bytes)} an accelerator: {takes}, and the engine needs "
            f"{format_bytes(weights)} of weights and a cache of {longest} tokens at least",
            "set learner.activation_checkpointing = true, lower learner.microbatch_tokens, shorten "
            "responses, take a smaller model, or set lora.rank",
        )
    given = ", ".join(f"engine.server.{key} = {value}" for key, value in share.options.items())
    beside = total_bytes - learner_share - weights - share.cache_bytes
    return MemoryPlan(
        share.options,
        f"{format_bytes(total_bytes)} of each accelerator{', time-shared' * time_sharing}: {takes};\n{given}: "
        f"{format_bytes(weights)} of weights and a cache of {tokens} tokens, "
        f"{format_bytes(beside)} left for the server's other memory",
    )


def plan_memory(config: Config, devices: Sequence[str]) -> MemoryPlan | None:
    """Plan for the smallest of the shared `devices`, given by name; None without devices.share. Raises ConfigError."""
    section, shape = config.devices, read_shape(config.model.path)
    if not section.share:
        return None
    if shape is None:
        refuse(
            "devices.share",
            True,
            f"divides memory by the model's size, which {config.model.path} does not say",
            "use accelerators of their own",
        )
    totals = [section.memory_gib * GIB] if section.memory_gib else memory_here() if devices else []
    if not totals:
        return MemoryPlan({}, "divided once accelerators are here; set devices.memory_gib to see the division before")
    return divide(config, shape, min(totals))


def with_memory_limits(config: Config, devices: Sequence[str]) -> Config:
    """The configuration with the engine options of the memory plan, if devices are shared. Raises ConfigError."""
    plan = plan_memory(config, devices) if devices else None
    if plan is None:
        return config
    server = config.engine.server | dict(plan.options)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"server": server})})
