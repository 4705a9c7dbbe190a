"""The dry run and a start ask engine and back end about the model, where it is not of a tested shape."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from april import config as configuration
from april.config.checks import check_model
from april.data.tokenizer import Tokenizer
from april.launch import check
from april.launch.check import (
    check_engine_model,
    check_models,
    check_run,
    check_weights,
    installed_backend,
    is_plain,
    try_apart,
)
from april.launch.findings import Findings
from april.launch.memory import read_shape
from april.launch.row_checks import warn_of_sampling
from april.workers.engines.entry import folder_tensors


def try_models(config, found):
    try_apart(check_models, config, found, "the model")


@pytest.fixture
def changed(config_file, tmp_path):
    """changed(**keys): the small run's configuration with other keys in its model's config.json."""

    def make(**keys):
        folder = tmp_path / "changed"
        shutil.copytree(configuration.load(config_file).model.path, folder, dirs_exist_ok=True)
        shape = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(shape | keys))
        return configuration.load(config_file, [f"--model.path={folder}"])

    return make


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True},
        {"layer_types": ["sliding_attention"]},
        {"layer_types": ["full_attention"] * 7},
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_scaling": {"type": "dynamic"}},
        {"quantization_config": {"bits": 4}},
        {"model_type": "gemma2"},
        {"hidden_act": "gelu"},
        {"intermediate_size": 7},
        {"num_hidden_layers": 2},
    ],
)
def test_what_is_not_of_a_tested_shape_is_tried(changed, keys):
    assert not is_plain(changed(**keys))


def test_what_is_plain_starts_no_process(changed):
    assert is_plain(changed())


@pytest.mark.full
def test_back_end_and_engine_both_say_what_they_object_to(changed):
    config, found = changed(model_type="mine", auto_map={"AutoConfig": "mine.Config"}), Findings()
    try_models(config, found)
    trained, used = found.errors
    assert trained.startswith(f"key 'model.path' = '{config.model.path}' cannot be trained: ")
    assert "custom code" in trained and "model_type 'mine'" in used and not found.warnings


@pytest.mark.parametrize("text", ["", '{"model_type": ', "[]", "null"])
def test_a_config_json_that_is_no_object_is_refused_with_a_sentence(changed, text):
    config = changed()
    (config.model.path / "config.json").write_text(text)
    assert read_shape(config.model.path) is None
    with pytest.raises(configuration.ConfigError, match="not a JSON object"):
        check_model(config)


@pytest.mark.parametrize("keys", [{"hidden_size": "abc"}, {"vocab_size": 12.5}, {"num_hidden_layers": -1}])
def test_a_size_that_is_none_is_refused_by_its_key(changed, keys):
    [(key, size)] = keys.items()
    with pytest.raises(configuration.ConfigError, match=f"{key} = {size!r}"):
        changed(**keys)


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_what_transformers_does_not_read_is_refused_with_its_reason(changed, engine):
    config = changed(layer_types=["full_attention"] * 7)
    config = config.model_copy(update={"worker": config.worker.model_copy(update={"engine": engine})})
    check_models(config, found := Findings())
    assert len(found.errors) == 2 and all("`num_hidden_layers` (1) must be equal" in said for said in found.errors)
    with pytest.raises(configuration.ConfigError, match=r"`num_hidden_layers` \(1\)"):
        Tokenizer(config.model.path)


def test_without_the_learner_only_the_engine_is_asked_about_a_model(changed, monkeypatch):
    asked = []
    monkeypatch.setattr(check, "try_apart", lambda trial, *others: asked.append(trial))
    monkeypatch.setattr(check, "installed_backend", lambda config: asked.append(installed_backend))
    for has_learner in (True, False):
        check_run(changed(hidden_act="gelu"), [], 0, Findings(), has_learner)
    assert asked == [check_models, installed_backend, check_engine_model]


def test_a_trial_that_dies_is_a_remark(changed, monkeypatch):
    monkeypatch.setattr(check, "TRIAL", "raise SystemError('no memory')")
    try_models(changed(), found := Findings())
    assert found.errors == [] and found.warnings[0].endswith("could not be tried: SystemError: no memory")


@pytest.mark.parametrize("before", ["", "import sys; print('importing', file=sys.stderr, flush=True); "])
def test_a_trial_that_takes_too_long_is_a_remark(changed, monkeypatch, before):
    monkeypatch.setattr(check, "TRIAL", f"{before}import time; time.sleep(60)")
    monkeypatch.setattr(check, "TRIAL_S", 0.5)
    try_models(changed(), found := Findings())
    assert found.errors == [] and found.warnings[0].endswith("could not be tried: it took longer than 0.5 s")


@pytest.mark.full
def test_a_trial_imports_no_file_of_the_working_folder_in_place_of_a_module(changed, monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('not the standard library')")
    monkeypatch.chdir(tmp_path)
    try_models(changed(model_type="mine", auto_map={"AutoConfig": "mine.Config"}), found := Findings())
    assert len(found.errors) == 2 and not found.warnings


def test_weights_by_peft_s_names_are_refused(changed):
    file = (folder := changed().model.path) / "model.safetensors"
    save_file({f"base_model.model.{name}": value for name, value in load_file(file).items()}, file)
    with pytest.raises(configuration.ConfigError, match="peft's names"):
        check_weights(folder)


def test_an_adapter_left_beside_merged_weights_is_no_part_of_the_model(changed):
    folder = (config := changed()).model.path
    tensors = folder_tensors(folder)
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    assert check_weights(folder) and is_plain(config)
    assert folder_tensors(folder) == tensors


AS_MAKERS_DO = ["--evaluation.temperature", "0.6", "--evaluation.top_p", "0.95"]


def test_held_out_prompts_that_are_sampled_otherwise_than_the_makers_do_are_told(config_file, policy_folder, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "named")
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (tmp_path / "named/generation_config.json").write_text(json.dumps(settings))
    temperature, top_p = "evaluation.temperature = 0.6", "evaluation.top_p = 0.95"
    vllm = ["--worker.engine", "vllm"]  # which does not cut held-out samples
    for words, told in (([], [f"{temperature}, {top_p}"]), (vllm, [temperature]), (AS_MAKERS_DO, [])):
        found = Findings()
        named = ["--model.path", str(tmp_path / "named")]
        warn_of_sampling(configuration.load(config_file, [*named, *words]), found)
        assert [sentence.rpartition(" set ")[2] for sentence in found.warnings] == told
