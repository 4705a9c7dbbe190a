"""`april plan` says what a run needs, and its changes make it fit."""

import json
import shutil

import pytest

from april.cli import main
from april.config import load
from april.launch.plan import needs_of, ways_to_fit
from tests.support.refusals import refusal

GIB = 2**30
SIZES = {
    "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 6144, "vocab_size": 151_936,
}  # fmt: skip
"""Sizes of Qwen3-1.7B."""
RECOMPUTED = ("--learner.activation_checkpointing", "true")


@pytest.fixture
def large(request, config_file, policy_folder, tmp_path):
    """The words that name a model of 1.7 billion parameters, or of so many layers, without weights, for one rank."""
    folder = tmp_path / "large"
    shutil.copytree(policy_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | SIZES | getattr(request, "param", {})))
    return [
        "--model.path", str(folder), "--learner.ranks", "1", "--learner.compute", "bf16",
        "--sampling.max_response_tokens", "100",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("share", ["false", "true"])
def test_each_set_of_changes_makes_the_run_fit_and_none_contains_another(config_file, large, share):
    config = load(config_file, [*large, "--devices.share", share])
    whole = needs_of(config).least
    assert whole > 24 * GIB
    ways = ways_to_fit(config, 24 * GIB)
    assert len(ways) == 3
    for chosen, said in ways:
        changed = config
        for change in chosen:
            changed = change.on(changed)
        assert needs_of(changed) == said and said.least <= 24 * GIB
    names = [{key for change in chosen for key in change.keys} for chosen, _ in ways]
    assert not any(one < other for one in names for other in names)
    assert ways_to_fit(config, 0.1 * GIB) == []


@pytest.mark.parametrize("large", [{"num_hidden_layers": 4}], indirect=True, ids=["four layers"])
def test_what_is_trained_and_kept_is_counted(config_file, large):
    def learner(*words):
        return needs_of(load(config_file, [*large, *words])).learner

    plain = learner()
    assert plain["optimizer"] == 2 * plain["gradients"] == 2 * plain["weights"]
    assert learner("--learner.optimizer", "adamw_8bit")["optimizer"] < 0.26 * plain["optimizer"]
    assert learner("--learner.optimizer_on_host", "true")["optimizer"] == 0
    assert learner("--algorithm.kl_coef", "0.1")["weights"] == 2 * plain["weights"]
    assert learner("--algorithm.advantage", "gae")["gradients"] == 2 * plain["gradients"]
    assert learner(*RECOMPUTED)["activations"] < 0.1 * plain["activations"]
    assert learner(*RECOMPUTED, "--learner.activations_on_host", "true")["activations"] == 0
    assert learner("--lora.rank", "2")["gradients"] < 0.01 * plain["gradients"]
    assert plain["gathered layers"] == 0 < learner("--learner.ranks", "2")["gathered layers"] < plain["weights"]
    assert 1.2 < learner("--learner.compute", "fp32")["activations"] / plain["activations"] < 2


@pytest.mark.full
def test_the_command_says_whether_it_fits_and_what_would_make_it(config_file, large, capsys):
    assert main(["plan", str(config_file), *large, "--gpu", "120"]) == 0
    assert "this fits" in capsys.readouterr().out
    assert main(["plan", str(config_file), *large, "--gpu", "24"]) == 1
    assert "learner.activation_checkpointing = true" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["nan", "0", "-8", "inf"])
def test_a_memory_that_is_none_is_refused(config_file, capsys, gpu):
    assert "option '--gpu' = " in refusal(capsys, "plan", config_file, f"--gpu={gpu}")
