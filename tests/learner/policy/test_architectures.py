"""Models that the learner cannot train are found before a run, by a small model with random weights."""

import errno
import json
import re
import shutil
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaMLP

import april.learner.policy as policy_module
from april.learner import performance
from april.learner.policy import LENGTHS, compared, objection, random_model, reduced, small_model
from april.util.errors import NotTried
from tests.support.small_run import make_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def changed(policy, tmp_path):
    """changed(**keys): the folder of the small policy with other keys in its config.json."""

    def make(**keys):
        folder = shutil.copytree(policy, tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))
        return folder

    return make


def small(family, tmp_path, **keys):
    """The folder of a small model of a family, with the features of its default configuration or of `keys`."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**keys))
    small_model(lambda: CONFIG_MAPPING[family](**keys), whole, 3_000_000).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "granite", "mamba2", "mistral", "gemma2"])
def test_what_the_learner_computes_passes(family, tmp_path):
    assert objection(small(family, tmp_path)) == ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gptj", "no list `layers`"),
        ("xglm", "(its XGLMAttention: "),
        ("gpt_neox_japanese", "(its GPTNeoXJapaneseAttention: "),
        ("phimoe", "is another than transformers computes"),
    ],
)
def test_what_it_does_not_is_a_sentence(family, said, tmp_path):
    assert said in objection(small(family, tmp_path))


def test_activations_that_cannot_be_recomputed_are_a_sentence(tmp_path):
    said = "the activations of JetMoeForCausalLM cannot be recomputed; set learner.activation_checkpointing = false"
    assert objection(small("jetmoe", tmp_path), recompute=True) == said


def test_a_model_whose_operations_cannot_be_counted_is_a_sentence(policy, monkeypatch):
    monkeypatch.setattr(performance, "forward_cost", Mock(side_effect=RuntimeError("heads of many sizes")))
    assert "RuntimeError: heads of many sizes" in objection(policy)


# --- a model with a layer of one's own ------------------------------------------------------------------------------


class Sums(nn.Module):
    """Adds to each token the mean of those before it in the row."""

    def forward(self, x):
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Haste(nn.Dropout):
    """Dropout by another name."""


class Batches(nn.BatchNorm1d):
    """Normalises by the statistics of all tokens that are computed together."""

    def forward(self, x):
        return super().forward(x[0])[None]


class First(nn.Module):
    """Adds the first token of the row to all."""

    def forward(self, x):
        return x + x[:, :1]


class Grain(nn.Module):
    """Adds a little noise in training."""

    def forward(self, x):
        return x + 0.003 * torch.randn_like(x) * self.training


class AlwaysGrain(nn.Module):
    """Adds noise, in transformers' own pass as well, which differs from itself as much."""

    def forward(self, x):
        return x + 0.01 * torch.randn_like(x)


class Straight(nn.Module):
    """Its values are of each token, and its gradient is of the row's mean."""

    def forward(self, x):
        return x + (x.mean(1, keepdim=True) - x.mean(1, keepdim=True).detach())


class Blocks(nn.Module):
    """Adds the mean of each block of 64 tokens of the row to the last one of it."""

    def forward(self, x):
        blocks = x[:, : x.shape[1] // 64 * 64].unflatten(1, (-1, 64))
        ends = nn.functional.pad(blocks.mean(2, keepdim=True), (0, 0, 63, 0)).flatten(1, 2)
        return x + nn.functional.pad(ends, (0, 0, 0, x.shape[1] % 64))


class Single(nn.Module):
    """A product with a matrix that stays fp32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("same", torch.eye(64), persistent=False)

    def forward(self, x):
        return x @ self.same


OWN = {
    "Blocks": Blocks, "Sums": Sums, "Haste": lambda: Haste(0.05), "Batches": lambda: Batches(64), "First": First,
    "Grain": Grain, "AlwaysGrain": AlwaysGrain,
}  # fmt: skip


@pytest.fixture
def with_layer(monkeypatch):
    """with_layer(make): a small model whose second layer, in every copy of it, has another module before its MLP."""

    def make(layer):
        built = LlamaMLP.__init__

        def init(mlp, config):
            built(mlp, config)
            LlamaMLP.made = getattr(LlamaMLP, "made", 0) + 1
            if LlamaMLP.made % 2 == 0:
                mlp.up_proj = nn.Sequential(layer(), mlp.up_proj)

        monkeypatch.setattr(LlamaMLP, "made", 0, raising=False)
        monkeypatch.setattr(LlamaMLP, "__init__", init)
        shape = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
        return random_model(CONFIG_MAPPING["llama"](**shape, num_hidden_layers=2))

    return make


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        ("Sums", "depends on the sequences that are packed with its own"),
        ("Blocks", "depends on the sequences that are packed with its own"),
        ("First", "depends on the sequences that are packed with its own"),
        ("Batches", "depends on the sequences that are packed with its own"),
        ("Haste", "changes from pass to pass"),
        ("Grain", "changes from pass to pass"),
        ("AlwaysGrain", "changes from pass to pass"),
    ],
)
def test_a_layer_that_is_computed_otherwise_is_named(with_layer, layer, what):
    said = compared(with_layer(OWN[layer]))
    assert re.match(
        rf"a token's log-probability, by its {layer} \(model\.layers\.1.*, in a LlamaDecoderLayer\), {what}", said
    )


def test_a_layer_that_fails_in_bf16_is_named(with_layer):
    said = compared(model := with_layer(Single))
    assert said.startswith("the learner cannot compute such a model in bfloat16, as on accelerators (its Single: ")
    assert compared(model, bf16=False) == ""


def test_a_gradient_that_sequences_give_each_other_is_found(with_layer):
    assert compared(with_layer(Straight)).startswith(
        "the gradient of model.layers.1.post_attention_layernorm.weight, of its LlamaRMSNorm "
        "(model.layers.1.post_attention_layernorm, in a LlamaDecoderLayer) or of what follows, is another than"
    )


def test_a_model_of_which_no_small_one_can_be_built_is_refused(changed, monkeypatch):
    monkeypatch.setattr(policy_module, "random_model", Mock(side_effect=ValueError("no such size")))
    assert objection(changed()) == (
        "no small model of type 'qwen3' can be built to prove what the learner computes (ValueError: no such size); "
        "use another model"
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantised"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "positions of type 'dynamic'",
        ),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "contains custom code"),
        ({"model_type": "mine"}, "does not recognize this architecture"),
        ({"hidden_size": 128}, ", and config.json makes it ["),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_a_sentence(changed, keys, said):
    assert said in objection(changed(**keys))


FAULTS = {
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "file size": SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    "memory": MemoryError(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_trouble_with_the_machine_is_no_objection(policy, monkeypatch, fault):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", Mock(side_effect=FAULTS[fault]))
    with pytest.raises(NotTried, match=f"tried: {type(FAULTS[fault]).__name__}: "):
        objection(policy)


def test_a_tensor_that_exceeds_memory_is_no_objection(policy, monkeypatch):
    monkeypatch.setattr("april.learner.policy.empty_policy", lambda *_: torch.empty(2**58))
    with pytest.raises(NotTried, match=r"RuntimeError: .*allocate memory"):
        objection(policy)


def test_weights_that_are_missing_are_named(changed):
    weights = load_file((folder := changed()) / "model.safetensors")
    assert objection(folder) == ""
    save_file({name: value for name, value in weights.items() if "up_proj" not in name}, folder / "model.safetensors")
    assert objection(folder) == "its weights lack model.layers.0.mlp.up_proj.weight; give a whole Hugging Face folder"


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "keys", "layers", "heads"),
    [
        ("qwen3_moe", {"num_hidden_layers": 48, "num_key_value_heads": 4, "hidden_size": 2048}, 2, 32),
        ("deepseek_v3", {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}, 4, 16),
        ("llama", {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}, 2, 32),
    ],
)
def test_a_large_model_is_tried_with_one_layer_of_each_kind_and_its_width(family, keys, layers, heads):
    config = partial(CONFIG_MAPPING[family], **keys)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config())
    kept = small_model(config, whole)
    assert (len(kept.model.layers), kept.config.num_attention_heads) == (layers, heads)
    assert {type(layer.mlp) for layer in kept.model.layers} == {type(layer.mlp) for layer in whole.model.layers}


def test_windows_chunks_and_original_lengths_are_shorter_than_the_sequences():
    ropes = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    small = reduced(CONFIG_MAPPING["gemma3_text"](sliding_window=512, rope_parameters={"full_attention": ropes}), 2)
    lengths = (small.sliding_window, small.rope_parameters["full_attention"]["original_max_position_embeddings"])
    assert max(lengths) < min(sorted(LENGTHS)[1:])
