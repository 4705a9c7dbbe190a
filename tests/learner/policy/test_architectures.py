"""Models that the learner cannot train are found before a run, by a small model with random weights."""

import errno
import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from april.learner.policy import objection, random_model, reduced
from april.learner.policy import small_model as small_model_of
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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "granite", "deepseek_v3"])
def test_what_the_learner_computes_passes(family, tmp_path):
    random_model(reduced(CONFIG_MAPPING[family](), dimensions=True)).save_pretrained(tmp_path)
    assert objection(tmp_path) == ""


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mistral", "the model uses sliding_window, which packed attention does not compute"),
        ("gemma2", "final_logit_softcapping changes its logits"),
        ("mamba", "carries a state on"),
        ("gpt_neox_japanese", "a token's log-probability depends on the sequences that are packed with its own, by "),
        ("xglm", "depends on the sequences that are packed with its own"),
        ("minimax", "depends on the sequences that are packed with its own"),
        ("phimoe", "a token's log-probability is another than transformers computes"),
        ("falcon", "its attention is of its own"),
        ("jetmoe", "cannot build or compute such a model (RuntimeError"),
    ],
)
def test_what_it_does_not_is_a_sentence(family, said, tmp_path):
    random_model(reduced(CONFIG_MAPPING[family](), dimensions=True)).save_pretrained(tmp_path)
    assert said in objection(tmp_path)


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
    with pytest.raises(NotTried, match=f"could not be tried: {type(FAULTS[fault]).__name__}: "):
        objection(policy)


def test_a_tensor_that_exceeds_memory_is_no_objection(policy, monkeypatch):
    monkeypatch.setattr("april.learner.policy.empty_policy", lambda folder, temperature: torch.empty(2**58))
    with pytest.raises(NotTried, match=r"could not be tried: RuntimeError: .*allocate memory"):
        objection(policy)


def test_weights_that_are_missing_are_named(changed):
    weights = load_file((folder := changed()) / "model.safetensors")
    assert objection(folder) == ""
    save_file({name: value for name, value in weights.items() if "up_proj" not in name}, folder / "model.safetensors")
    assert objection(folder) == "its weights lack model.layers.0.mlp.up_proj.weight; give a whole Hugging Face folder"


def test_a_large_model_is_tried_small_with_the_same_features(tmp_path):
    config = CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=48, num_key_value_heads=4, vocab_size=151_936)
    config.save_pretrained(tmp_path)
    large = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(10**9, device="meta"))])
    small = small_model_of(tmp_path, large)
    assert sum(parameter.numel() for parameter in small.parameters()) < 1e6
    assert (small.config.num_hidden_layers, small.config.num_key_value_heads, small.config.num_experts) == (4, 2, 8)
