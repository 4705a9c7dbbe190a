"""Divides the memory of shared accelerators: estimates what the learner needs from the model and its micro-batches, and
gives the rest to the engine."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.broker.header import StoredTensor, tensors_of
from april.config import Config
from april.config.advantages import needs_critic
from april.config.algorithms import named, used_algorithms
from april.config.teachers import held_teacher
from april.config.training import check_base, layers_to_adapt
from april.launch.devices import memory_here
from april.learner.backends import BACKENDS
from april.learner.optimizers import state_bytes
from april.util.errors import refuse
from april.util.files import weight_files
from april.util.text import format_bytes
from april.workers.engines import ENGINES

# --- model size -------------------------------------------------------------------------------------------------------

WEIGHT_BYTES = 2
"""Bytes per parameter in an engine and in a weight transfer: bfloat16."""


@dataclass(frozen=True)
class ModelShape:
    """Size of a Qwen or Llama model."""

    parameters: int
    kv_bytes: int
    """KV cache bytes per token in an engine: bfloat16."""
    context: int
    layers: int
    layer: int
    """Parameters of a layer."""
    hidden: int
    kept_bytes: int
    """Activation bytes per token and layer kept for the backward pass: bfloat16, but float32 inside norms. The estimate
    is 9 % above what an H200 needed for 1.7 billion parameters."""
    compiled_bytes: int
    """Activation bytes per token and layer with `learner.compile`: the inputs of matrix products, norms, rotation, gate
    and attention, bfloat16."""
    head: int
    """Parameters of the output projection."""


def read_shape(folder: Path) -> ModelShape | None:
    """Size of the model in a folder; None without a config.json of a known architecture."""
    try:
        config = json.loads((folder / "config.json").read_text())
        hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocabulary, inner, context = (
            config[key] for key in ("vocab_size", "intermediate_size", "max_position_embeddings")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(size, int) and size > 0 for size in (hidden, layers, heads, vocabulary, inner, context)):
        return None
    head = config.get("head_dim") or hidden // heads
    kv_width, query_width = config.get("num_key_value_heads", heads) * head, heads * head
    attention = 2 * hidden * query_width + 2 * hidden * kv_width
    if config.get("model_type") == "qwen2":
        attention += query_width + 2 * kv_width
    if config.get("model_type") == "qwen3":
        attention += 2 * head
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    layer = attention + 3 * hidden * inner + 2 * hidden
    parameters = embeddings + layers * layer + hidden
    kept = 16 * hidden + 14 * (query_width + kv_width) + 8 * inner
    compiled = 8 * hidden + 10 * query_width + 2 * kv_width + 6 * inner
    kv_bytes = 2 * layers * kv_width * WEIGHT_BYTES
    return ModelShape(parameters, kv_bytes, context, layers, layer, hidden, kept, compiled, head=vocabulary * hidden)


def has_tensors(folder: Path, shape: Mapping[str, Any]) -> bool:
    """Whether the files of a Llama-shaped model in `folder` have all its matrices, in the shapes that `shape` (the
    content of its config.json) gives, and all layers have full attention. A stand-in folder without any tensor passes,
    as in tests of configurations."""
    found = {tensor.name: list(tensor.shape) for tensor in all_tensors(folder)}
    try:
        hidden, inner, heads = (shape[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        queries = heads * (shape.get("head_dim") or hidden // heads)
        keys = queries // heads * (shape.get("num_key_value_heads") or heads)
        wanted = {"model.embed_tokens.weight": [shape["vocab_size"], hidden], "model.norm.weight": [hidden]}
        for layer in range(shape["num_hidden_layers"]):
            matrices = {
                "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden],
                "self_attn.v_proj": [keys, hidden], "self_attn.o_proj": [hidden, queries],
                "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
                "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
            }  # fmt: skip
            wanted |= {f"model.layers.{layer}.{name}.weight": size for name, size in matrices.items()}
        layers = ["full_attention"] * shape["num_hidden_layers"]
    except (KeyError, TypeError, ZeroDivisionError):
        return False
    fits = not found or all(found.get(name) == size for name, size in wanted.items())
    return fits and (shape.get("layer_types") or layers) == layers


# --- trained parameters with an adapter -------------------------------------------------------------------------------

NOT_ADAPTED = (".experts.", ".mlp.gate.")
"""Parts of the names of matrices that get no adapter: experts, which the learner keeps as one tensor, and routers."""
EMBEDDING_SUFFIX, HEAD_SUFFIX = "embed_tokens.weight", "lm_head.weight"
"""Suffixes of the names of the embedding and the output head."""


def linears_of(folder: Path) -> dict[str, int]:
    """Input size plus output size of each linear layer inside the transformer layers, by name."""
    return {tensor.name.removesuffix(".weight"): sum(tensor.shape) for tensor in layer_matrices(folder)}


def layer_matrices(folder: Path) -> list[StoredTensor]:
    """Names, shapes and places in the folder's files of the weight matrices of linear layers inside the transformer
    layers, without those that get no adapter (`NOT_ADAPTED`)."""
    return [
        tensor
        for tensor in all_tensors(folder)
        if ".layers." in tensor.name
        and tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and not any(part in tensor.name for part in NOT_ADAPTED)
    ]


def adapter_parameters(config: Config) -> int:
    """Number of trained parameters with the `[lora]` section: the adapter, and whole tensors trained with it. Raises
    ConfigError if the model lacks a layer that the section names, or has weights that the section's base would
    round."""
    own = json.loads((config.model.path / "config.json").read_text())
    check_base(config.lora, own.get("dtype") or own.get("torch_dtype") or "")
    linears = linears_of(config.model.path)
    width = sum(linears[name] for name in layers_to_adapt(linears, config.lora))
    return config.lora.rank * width + whole_parameters(config)


def whole_parameters(config: Config) -> int:
    """Number of the model's parameters that are trained in full, in addition to the adapter."""
    if not config.lora.embedding:
        return 0
    folder = config.model.path
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    names = EMBEDDING_SUFFIX if tied else (EMBEDDING_SUFFIX, HEAD_SUFFIX)
    return sum(math.prod(tensor.shape) for tensor in all_tensors(folder) if tensor.name.endswith(names))


def saved_by_base(config: Config, parameters: int) -> float:
    """Bytes by which `lora.base` makes frozen weights smaller than fp32, of a model of `parameters` parameters."""
    if config.lora.base == "fp32":
        return 0.0
    matrices = layer_matrices(config.model.path) if config.lora.base == "nf4" else []
    packed = sum(math.prod(tensor.shape) for tensor in matrices)
    return 2 * (parameters - whole_parameters(config)) + (2 - NF4_BYTES) * packed


def all_tensors(folder: Path) -> Iterator[StoredTensor]:
    return (tensor for path in weight_files(folder) if path.is_file() for tensor in tensors_of(path))


# --- division ---------------------------------------------------------------------------------------------------------

GIB = 1 << 30
VALUE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a weight, and of a trained weight's gradient, by `learner.master_weights`."""
NF4_BYTES = 0.5 + 4 / 64
"""Bytes per weight in NF4: 4 bits, and its share of the 4-byte scale of 64 weights."""
HEAD_BYTES = 12
"""Temporary bytes per parameter of the output head: bfloat16 weight and gradient, and two float32 copies of the
gradient."""
BLOCK_LOGITS = 1 << 27
"""Maximum number of logits that the learner's output head computes at a time, as a block:
`LOGITS_PER_ACCELERATOR_CHUNK` of `april/learner/head.py`."""
LOGIT_BYTES = 12
"""Bytes per logit of a block: logit, log-probability, and the loss's temporaries."""
CONTEXT_BYTES = GIB
"""Estimated memory of the CUDA context, its libraries, and fragmentation (bytes)."""
RELEASED_SERVER_BYTES = 2 << 30
"""Estimated memory that an inference server keeps after it has released weights and cache (bytes): its context and its
allocator's reserve."""


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
    saved = saved_by_base(config, shape.parameters) if config.lora.is_set else 0.0
    if has_reference(config):
        resident, saved = resident + shape.parameters, 2 * saved
    if needs_critic(config):
        resident, trained = resident + shape.parameters, trained + shape.parameters
    each = VALUE_BYTES[config.learner.master_weights]
    trained_bytes = each + state_bytes(config.learner)
    return (resident * each - saved + trained * trained_bytes + teacher_bytes(config)) // config.learner.ranks


def has_reference(config: Config) -> bool:
    """Whether the learner holds a second copy of the starting policy."""
    pulled = any(algorithm.kl_coef for algorithm in used_algorithms(config).values()) or config.critic.kl_coef
    return bool(pulled) and not config.lora.base_is_frozen


def teacher_bytes(config: Config) -> float:
    """Bytes of the weights of a teacher that the learner holds, over all ranks: bfloat16 if they are that in its
    folder, otherwise fp32."""
    teacher = held_teacher(config)
    tensors = all_tensors(teacher.path) if teacher else iter(())
    return sum(math.prod(each.shape) * (2 if each.kind.startswith("BF16") else 4) for each in tensors)


def gathered_bytes(config: Config, layer: int, outside: int) -> float:
    """Most bytes of whole tensors that a rank gathers from the others in a backward pass; 0 with one rank, or if the
    back end splits each layer over the ranks. These are the weights of two layers, the gradients of one, those of two
    in fp32 while they are summed over the ranks, and the weights and gradients of what is outside the layers.

    `layer`: parameters of the largest layer. `outside`: those outside the layers, without the head's, which
    `HEAD_BYTES` counts.
    """
    if config.learner.ranks == 1 or BACKENDS.find(config.learner.backend).splits_layers:
        return 0.0
    each = 4 if config.learner.compute == "fp32" else 2
    if config.lora.is_set:
        return float(2 * layer * each + outside * each)
    return float(layer * (3 * each + 8) + outside * (2 * each + 4))


def activations_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of a micro-batch's activations: those of all layers; with activation checkpointing, the input of every
    layer, unless it is offloaded to the host, and all activations of one layer."""
    learner = config.learner
    kept = shape.compiled_bytes if learner.compile else shape.kept_bytes
    each = shape.layers * kept
    if learner.activation_checkpointing:
        each = (0 if learner.activations_on_host else shape.layers * 2 * shape.hidden) + kept
    return float(pass_tokens(config) * each * (2 if learner.compute == "fp32" else 1))


def handed_over_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes that learner and worker each need for published weights if these are handed over in the accelerator's
    memory: two versions, since the old one stays until the new one has replaced it."""
    transport = config.shipped_part("weights.transport")
    return 2.0 * shape.parameters * WEIGHT_BYTES if transport and transport.device != "cpu" else 0.0


def head_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of the output head's temporaries and of one block of logits."""
    logits = min(BLOCK_LOGITS, pass_tokens(config) * shape.head // shape.hidden)
    return float(shape.head * HEAD_BYTES + logits * LOGIT_BYTES) + teacher_head_bytes(config, shape)


def teacher_head_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of the copy of the teacher's head with which a divergence is computed, or of the policy's head if the
    policy teaches itself; 0 for a teacher that scorers ask."""
    teacher = held_teacher(config)
    theirs = read_shape(teacher.path) if teacher else shape if config.algorithm.hint else None
    return float(theirs.head * WEIGHT_BYTES) if named(config, "divergence") and theirs else 0.0


def pass_tokens(config: Config) -> int:
    """Maximum number of tokens in a forward and backward pass of a rank of the learner."""
    longest = config.longest_prompt_tokens + config.sampling.max_response_tokens
    return max(config.learner.microbatch_tokens, math.ceil(longest / config.learner.context_parallel))


def divide(config: Config, shape: ModelShape, total_bytes: float) -> MemoryPlan:
    """Plan for an accelerator of `total_bytes`. Raises ConfigError if what the learner leaves is too small for the
    engine's weights and the KV cache of one response."""
    outside = shape.parameters - shape.layers * shape.layer - shape.head
    states, activations = states_bytes(config, shape), activations_bytes(config, shape)
    head, gathered = head_bytes(config, shape), gathered_bytes(config, shape.layer, outside)
    handed = handed_over_bytes(config, shape)
    learner, ranks = states + gathered + activations + head + handed + CONTEXT_BYTES, config.engine.tensor_ranks
    weights, longest = shape.parameters * WEIGHT_BYTES / ranks, config.longest_prompt_tokens
    longest += config.sampling.max_response_tokens
    time_sharing = config.devices.turns
    learner_share = CONTEXT_BYTES if time_sharing else learner
    share = ENGINES.find(config.worker.engine).memory_options(config, total_bytes, total_bytes - learner_share, weights)
    tokens = int((share.cache_bytes - handed) // (shape.kv_bytes / ranks))
    takes = (
        f"the learner takes about {format_bytes(learner)} ({format_bytes(states)} of weights, gradients and moments, "
        f"{f'{format_bytes(gathered)} of gathered layers, ' if gathered else ''}"
        f"{f'{format_bytes(handed)} of published weights, ' if handed else ''}"
        f"{format_bytes(activations)} of activations, {format_bytes(head)} of logits and the head)"
    )
    if tokens < longest or (time_sharing and learner + RELEASED_SERVER_BYTES > total_bytes):
        refuse(
            "devices.share",
            True,
            f"does not suffice with {format_bytes(total_bytes)} an accelerator: {takes}, and the engine needs "
            f"{format_bytes(weights)} of weights and a cache of {longest} tokens at least",
            "set learner.activation_checkpointing = true, lower learner.microbatch_tokens, shorten "
            "responses, take a smaller model, or set lora.rank",
        )
    given = ", ".join(f"engine.server.{key} = {value}" for key, value in share.options.items())
    beside = total_bytes - learner_share - weights - share.cache_bytes + handed
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
