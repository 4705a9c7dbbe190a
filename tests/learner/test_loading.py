"""Each rank reads its own rows of a model's files, and together the ranks hold the files' values bit by bit."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3Config, Qwen3MoeConfig

from april.learner import checkpoint, exports, loading
from april.learner.loading import ModelError
from april.learner.model import empty_policy, load, load_sharded
from tests.support.learner.architectures import EXPERTS, GLM_EXPERTS, SHAPE, random_model
from tests.support.learner.comparison import equal

CPU = torch.device("cpu")
RANKS = 3
"""Ranks of which the last gets no row of a tensor with four rows, and no expert of four."""


@pytest.fixture
def rank():
    """Make this process rank r of several that do not exist; loading does not communicate."""

    def become(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)

    yield become
    dist.destroy_process_group()


@pytest.fixture
def read(monkeypatch):
    """Slice of a file that counts the elements read."""
    counted = []

    class Counting:
        def __init__(self, tensor):
            self.tensor, self.get_shape = tensor, tensor.get_shape

        def __getitem__(self, rows):
            found = self.tensor[rows]
            counted.append(found.numel())
            return found

    slices = loading.WeightFiles.slices
    monkeypatch.setattr(
        loading.WeightFiles, "slices", lambda *found: {key: Counting(tensor) for key, tensor in slices(*found).items()}
    )
    return counted


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, tie_word_embeddings=True),
        Qwen3Config(**SHAPE),
        Qwen3MoeConfig(**SHAPE, **EXPERTS | {"num_experts": 11}),
        Glm4MoeConfig(**SHAPE, **GLM_EXPERTS),
    ],
    ids=["tied", "untied", "qwen3_moe", "glm4_moe"],
)
def test_each_rank_reads_only_its_rows_and_together_they_hold_the_files(config, rank, read, tmp_path):
    """Split the weights into several files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    parts, buffers = [], sum(buffer.numel() for _, buffer in loading.persistent_buffers(expected))
    for number in range(RANKS):
        rank(number)
        read.clear()
        policy = load_sharded(empty_policy(tmp_path, 1.0), tmp_path, CPU)
        kept = {name: parameter.to_local() for name, parameter in policy.lm.named_parameters()}
        assert sum(read) == sum(value.numel() for value in kept.values()) + buffers
        parts.append(kept)
    for name, value in expected.named_parameters():
        assert torch.equal(torch.cat([kept[name] for kept in parts]), value), name
    for name, value in expected.named_buffers():
        assert torch.equal(policy.lm.get_buffer(name), value), name
    assert policy.lm.config.tie_word_embeddings == (
        policy.lm.get_output_embeddings().weight is policy.lm.get_input_embeddings().weight
    )


def test_types_of_the_files_become_fp32(tmp_path):
    folder = random_model(Qwen3Config(**SHAPE, dtype=torch.bfloat16), tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = load(folder, 1.0).lm.state_dict()
    assert found.keys() == expected.keys() and equal(found, expected)


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def without_a_norm(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))


def with_a_wider_norm(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)}))


def with_another_head(folder):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))


def quantised(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_a_norm, "its weights lack model.norm.weight"),
        (with_a_wider_norm, r"its model.norm.weight is \[33\], and config.json makes it \[32\]"),
        (with_another_head, "config.json ties lm_head.weight"),
        (quantised, "its weights are quantised"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors"),
    ],
    ids=["a tensor less", "another shape", "a head that is not tied", "quantised", "no file"],
)
def test_an_incomplete_folder_is_refused(tmp_path, spoil, sentence):
    folder = random_model(Qwen3Config(**SHAPE, tie_word_embeddings=True), tmp_path)
    spoil(folder)
    with pytest.raises(ModelError, match=sentence):
        load(folder, 1.0)


def test_unknown_tensors_are_skipped_and_a_tied_head_is_read_once(tmp_path, caplog):
    folder = random_model(Qwen3Config(**SHAPE, tie_word_embeddings=True), tmp_path)
    expected = load(folder, 1.0).lm.state_dict()
    more = {"lm_head.weight": expected["lm_head.weight"].clone(), "model.layers.9.extra": torch.ones(2)}
    rewrite(folder, lambda tensors: tensors.update(more))
    found = load(folder, 1.0).lm.state_dict()
    assert equal(found, expected)
    assert "1 of its tensors are left out, the first is model.layers.9.extra" in caplog.text


def test_a_tied_weight_may_stand_under_the_head_s_name(tmp_path):
    folder = random_model(Qwen3Config(**SHAPE, tie_word_embeddings=True), tmp_path)
    expected = load(folder, 1.0).lm.state_dict()
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    found = load(folder, 1.0).lm.state_dict()
    assert equal(found, expected)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_weights_in_fp16_are_trained_in_fp32_and_exported_as_they_came(named, rank, tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).half().save_pretrained(tmp_path / "halves")
    if not named:
        file = tmp_path / "halves/config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "dtype"}))
    files = load_file(tmp_path / "halves/model.safetensors")
    assert {tensor.dtype for tensor in files.values()} == {torch.float16}
    policy = load(tmp_path / "halves", 1.0)
    found = policy.lm.state_dict()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in files.items())
    rank(0)
    dtype = checkpoint.dtype_of_folder(tmp_path / "halves")
    state = {name: tensor.to(dtype or tensor.dtype) for name, tensor in files.items()}
    exports.export(policy.lm, state, tmp_path / "halves", tmp_path / "policy")
    assert equal(load_file(tmp_path / "policy/model.safetensors"), files)
