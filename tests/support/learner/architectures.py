"""Tiny models of each supported architecture, with random weights."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.learner.small_learner import VOCAB

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GLM_EXPERTS = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def random_model(config, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


ARCHITECTURES = pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE),
        Qwen2Config(**SHAPE),
        LlamaConfig(**SHAPE),
        Glm4Config(**SHAPE),
        Qwen3MoeConfig(**SHAPE, **EXPERTS),
        Qwen3MoeConfig(**SHAPE, **EXPERTS | {"moe_intermediate_size": 6}),
        Glm4MoeConfig(**SHAPE, **GLM_EXPERTS),
    ],
    ids=lambda config: config.model_type,
)
