"""Families of transformers' causal models, made small."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from april.learner.loading import turn_off_noise

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LOW_RANKS = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATES = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
FAMILIES = {
    "qwen3": {},
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": WINDOW
    | EXPERTS
    | {"use_sliding_window": True, "max_window_layers": 2, "shared_expert_intermediate_size": 16},
    "llama": {},
    "llama4_text": {
        "attention_chunk_size": 6, "num_local_experts": 4, "intermediate_size_mlp": 24, "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2, "floor_scale": 4,
    },
    "mistral": WINDOW,
    "mixtral": WINDOW | {"num_local_experts": 4},
    "gemma2": WINDOW | {"query_pre_attn_scalar": 11},
    "gemma3_text": WINDOW | {"num_hidden_layers": 6, "final_logit_softcapping": 9.0},
    "gpt_oss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": WINDOW,
    "phi": {"num_key_value_heads": 4},
    "phi3": WINDOW,
    "phimoe": WINDOW | {"num_local_experts": 4},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": WINDOW,
    "cohere": {"logit_scale": 0.3},
    "cohere2": WINDOW,
    "exaone4": WINDOW,
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": ROUTED | LOW_RANKS,
    "glm4": {},
    "glm4_moe": ROUTED,
    "seed_oss": {},
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmo_hybrid": DELTA,
    "kimi_linear": LOW_RANKS | {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4,
        "linear_head_dim": 8, "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 16,
        "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8, "num_local_experts": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": STATES | {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
    "falcon_h1": STATES | {"mamba_d_ssm": 32, "lm_head_multiplier": 0.3, "ssm_out_multiplier": 0.7},
    "granitemoehybrid": STATES | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16, "logits_scaling": 2.0, "mamba_n_heads": 8,
    },
    "jamba": {
        "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "mamba": {"state_size": 4, "num_hidden_layers": 2},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "recurrent_gemma": {
        "num_hidden_layers": 3, "attention_window_size": 6, "lru_width": 32,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
}  # fmt: skip
"""Keys of each family's configuration beside `SHAPE`, by the family's `model_type`."""


@torch.no_grad()
def family(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | FAMILIES[name])
    turn_off_noise(config)
    lm = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for weight in lm.parameters():
        if weight.dim() < 2:
            weight += 0.3 * torch.randn_like(weight)  # norms, biases and sinks that matter
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return lm.train()
