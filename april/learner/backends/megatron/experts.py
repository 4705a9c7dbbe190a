"""Megatron's configuration of a model's experts: routing as in transformers, without token dropping or auxiliary
loss."""

from pathlib import Path
from typing import Any

from torch import nn

from april.learner.backends.megatron.layout import ParallelLayout
from april.learner.loading import ModelError


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
