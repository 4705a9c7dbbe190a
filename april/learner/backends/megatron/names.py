"""Mapping of Hugging Face tensors and configuration to Megatron's, and the tensors' distribution over the ranks.

Megatron stores queries, keys and values of a layer in one matrix, group by group: the queries of a group, its key, its
value. Gate and up projection share another matrix, gate first on each rank. Tensor-parallel ranks hold rows of both
matrices and of embedding and head, and columns of the attention output and down projections. Other tensors are
replicated, except experts. A stage holds its layers; a head tied to the embedding is on the last stage and on the
first.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from april.learner.backends.megatron.layout import SHARES, ParallelLayout
from april.learner.backends.megatron.piece import COLUMNS, ROWS, MappedTensor, StackedExperts
from april.learner.loading import ModelError

LAYER = "model.layers."
EMBEDDING = "model.embed_tokens.weight"
STACKED = {
    "mlp.experts.gate_up_proj": ("linear_fc1", ("gate_proj", "up_proj")),
    "mlp.experts.down_proj": ("linear_fc2", ("down_proj",)),
}
"""By suffix of the name of a tensor that stacks experts in the Hugging Face model: (name of the linear layer in
Megatron's experts, projections that the tensor stacks)."""


def mapped_tensors(model: nn.Module, lm: nn.Module, layout: ParallelLayout) -> Iterator[MappedTensor]:
    """A `MappedTensor` for each tensor of `lm` that this rank's pipeline stage holds. `model`: the stage's `GPTModel`.
    `lm`: the whole Hugging Face model, on the meta device. Raises ModelError for a tensor without a counterpart."""
    span = layout.stage_layers(lm.config.num_hidden_layers, layout.stage)
    embedding = "embedding.word_embeddings.weight" if layout.stage == 0 else "output_layer.weight"
    parameters, mesh = dict(model.named_parameters()), layout.layers
    groups = lm.config.num_key_value_heads // layout.tensor_parallel
    heads = (groups, 2 + lm.config.num_attention_heads // lm.config.num_key_value_heads, -1)
    targets: dict[str, tuple[str, int | None, Callable[[Tensor], Tensor]]] = {
        EMBEDDING: (embedding, ROWS, whole),
        "model.norm.weight": ("decoder.final_layernorm.weight", None, whole),
        "lm_head.weight": ("output_layer.weight", ROWS, whole),
        "input_layernorm.weight": ("input_layernorm.weight", None, whole),
        "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", None, whole),
        "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", None, whole),
        "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", None, whole),
        "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", COLUMNS, whole),
        "mlp.gate_proj.weight": ("mlp.linear_fc1.weight", ROWS, gate),
        "mlp.up_proj.weight": ("mlp.linear_fc1.weight", ROWS, up),
        "mlp.down_proj.weight": ("mlp.linear_fc2.weight", COLUMNS, whole),
        "mlp.gate.weight": ("mlp.router.weight", None, whole),
    }
    for kind in ("weight", "bias"):
        for name, select in (("q", queries), ("k", keys), ("v", values)):
            fused = f"self_attention.linear_qkv.{kind}"
            targets[f"self_attn.{name}_proj.{kind}"] = (fused, ROWS, partial(select, heads))
    for name, tensor in lm.named_parameters():
        number, _, rest = name.removeprefix(LAYER).partition(".")
        in_layer = name.startswith(LAYER)
        if layout.stage not in stages_holding(name, lm, layout):
            continue
        if in_layer:
            number = str(int(number) - span.start)
        if in_layer and rest in STACKED:
            linear, kinds = STACKED[rest]
            experts = model.decoder.layers[int(number)].mlp.experts.local_experts
            stacked = [getattr(expert, linear).weight for expert in experts]
            yield StackedExperts(name, stacked, tensor, ROWS, layout.experts, whole, kinds, layout.splits_experts)
            continue
        target = targets.get(rest if in_layer else name)
        found = target and parameters.get(f"decoder.layers.{number}.{target[0]}" if in_layer else target[0])
        if target is None or found is None:
            raise ModelError(f"{lm.config.name_or_path}: its {name} has no place in Megatron's model")
        _, dim, view = target
        if view is whole and dim == ROWS:
            view = partial(without_padding, own_rows(tensor, mesh))
        yield MappedTensor(name, [found], tensor, dim, mesh, view)


def stages_holding(name: str, lm: nn.Module, layout: ParallelLayout) -> Sequence[int]:
    """Stages that hold the tensor `name` of `lm`; the first of them publishes it."""
    config, last = lm.config, layout.stages - 1
    if name.startswith(LAYER):
        number = int(name.removeprefix(LAYER).partition(".")[0])
        return [
            stage for stage in range(layout.stages) if number in layout.stage_layers(config.num_hidden_layers, stage)
        ]
    if name == EMBEDDING:
        return [0, last] if config.tie_word_embeddings and last else [0]
    return [last]


def check_stages(lm: nn.Module, folder: Path, layout: ParallelLayout) -> None:
    """Raises ModelError for a model with fewer layers than stages."""
    layers = lm.config.num_hidden_layers
    if layers < layout.stages:
        raise ModelError(
            f"{folder}: learner.pipeline_parallel = {layout.stages} wants as many layers, and it has {layers}"
        )


def own_rows(tensor: Tensor, mesh: DeviceMesh) -> int:
    """Number of rows of `tensor`, [vocabulary, D], on this rank, without the padding that gives each tensor-parallel
    rank equally many rows."""
    each = -(-len(tensor) // mesh[SHARES].size())
    return max(0, min(each, len(tensor) - mesh.get_local_rank(SHARES) * each))


def whole(tensor: Tensor) -> Tensor:
    return tensor


def without_padding(rows: int, tensor: Tensor) -> Tensor:
    return tensor[:rows]


def gate(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[0]


def up(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[1]


def queries(heads: tuple[int, int, int], tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, heads)[:, :-2]


def keys(heads: tuple[int, int, int], tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, heads)[:, -2]


def values(heads: tuple[int, int, int], tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, heads)[:, -1]


# --- experts ----------------------------------------------------------------------------------------------------------


def has_experts(layer: nn.Module) -> bool:
    return hasattr(layer.mlp, "experts")


def expert_arguments(lm: nn.Module, layout: ParallelLayout) -> dict[str, Any]:
    """Arguments of a `TransformerConfig` about experts; {} for a model without experts.

    If the weights of the chosen experts sum to 1 (`norm_topk_prob`), the softmax is over the chosen logits only.
    """
    config, with_experts = lm.config, [int(has_experts(layer)) for layer in lm.base_model.layers]
    if not any(with_experts):
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_layer_freq": 1 if all(with_experts) else with_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": layout.expert_parallel,
        "expert_tensor_parallel_size": layout.tensor_parallel if layout.expert_parallel == 1 else 1,
        "sequence_parallel": layout.tensor_parallel > 1,
    }


def check_experts(lm: nn.Module, folder: Path, layout: ParallelLayout) -> None:
    """Raises ModelError for a model whose experts Megatron cannot train, or not with this parallelism."""
    config, each = lm.config, layout.expert_parallel
    if not any(map(has_experts, lm.base_model.layers)):
        if each > 1:
            raise ModelError(f"{folder}: learner.expert_parallel = {each} divides experts, and the model has none")
        return
    if config.num_experts % each:
        raise ModelError(
            f"{folder}: learner.expert_parallel = {each} does not divide its num_experts = {config.num_experts}"
        )
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise ModelError(
            f"{folder}: with norm_topk_prob = true and one expert a token its routers get no gradient, which Megatron "
            "refuses; use another back end"
        )
