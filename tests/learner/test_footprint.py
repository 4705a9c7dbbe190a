"""What a plan says that a pass keeps is what a pass keeps."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from april.config.training import LoraSection
from april.learner import attention, lora
from april.learner.footprint import footprint
from april.learner.loading import load_weights
from april.learner.model import empty_policy
from tests.support.learner.pictures import MERGE, vision_model

SIZES = {
    "vocab_size": 23, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48,
}  # fmt: skip
MODELS = {
    "dense": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "another head": LlamaConfig(**SIZES),
    "windows": Gemma3TextConfig(**SIZES, sliding_window=16),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


ADAPTERS = {
    "whole": LoraSection(),
    "adapter": LoraSection(rank=4, alpha=8),
    "packed base": LoraSection(rank=4, alpha=8, base="nf4"),
}


@pytest.mark.full
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_pass_keeps_what_its_footprint_says(tmp_path, config, adapter, dtype):
    tokens = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = footprint(tmp_path, adapter, bf16=dtype is torch.bfloat16, tokens=tokens)
    policy = empty_policy(tmp_path, 1.0)
    assert said.model == sum(parameter.numel() for parameter in policy.parameters())
    if adapter.is_set:
        lora.attach(policy.lm, adapter, seed=0)
    load_weights(policy.lm, tmp_path)
    assert said.held_bytes == sum(parameter.untyped_storage().nbytes() for parameter in policy.parameters())
    assert said.trained == sum(parameter.numel() for _, parameter in policy.trained)
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.is_floating_point() else parameter.data
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.lm.base_model(
            input_ids=torch.randint(0, 20, (1, tokens)), position_ids=torch.arange(tokens)[None] % 16,
            attention_mask=None, use_cache=False,
            packing=attention.Packing([16] * 4, torch.arange(5, dtype=torch.int32) * 16),
        )  # fmt: skip
    measured = sum(each.untyped_storage().nbytes() for memory, each in kept.items() if memory not in own)
    if config is MODELS["experts"] and dtype is torch.float32:  # no fp32 product of experts without values is known
        assert measured < said.kept_bytes * tokens < 2 * measured
    else:
        assert said.kept_bytes * tokens == pytest.approx(measured, rel=0.05)


@pytest.mark.full
def test_a_footprint_needs_no_memory(tmp_path):
    """A model of 30 billion parameters, 120 GB in fp32, of which there is a config.json alone."""
    Qwen3Config(hidden_size=8192, intermediate_size=49152, num_hidden_layers=24).save_pretrained(tmp_path)
    assert footprint(tmp_path, LoraSection(), bf16=True).model > 30e9


def test_a_vision_tower_counts_as_weights_and_where_it_is_trained_in_all(tmp_path):
    lm = vision_model("qwen3_vl", tmp_path)
    frozen, trained = (footprint(tmp_path, LoraSection(), bf16=False, freeze_vision=each) for each in (True, False))
    tower = sum(parameter.numel() for parameter in lm.model.visual.parameters())
    assert frozen.model == trained.model == trained.trained == frozen.trained + tower
    lm.model.visual.set_attn_implementation("sdpa")  # as the learner does
    patches, block, kept = 64, lm.model.visual.blocks[0], {}
    angles = torch.zeros(patches, block.attn.head_dim)

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.zeros(patches, 16), cu_seqlens=torch.tensor([0, patches]), position_embeddings=(angles, angles))
    own = {parameter.data_ptr() for parameter in block.parameters()}
    measured = sum(size for pointer, (size, _) in kept.items() if pointer not in own) / (patches / MERGE**2)
    assert trained.kept_bytes - frozen.kept_bytes == pytest.approx(2 * measured, rel=0.2)
