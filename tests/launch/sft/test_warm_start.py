"""The quickstart policy's folder: whole, loadable, the same for the same seed, and trained by `april sft`."""

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.config import ConfigError
from april.data.arithmetic import demonstrations, split_of
from april.launch.sft import warm_start as module
from april.launch.sft.warm_start import Recipe, make_policy
from april.learner.policy.arithmetic import VOCABULARY
from tests.support.warm_imports import Popen

pytestmark = pytest.mark.xdist_group("warm start")
SMALL = Recipe(hidden_size=64, layers=1, easy=16, clean=16, noisy=32)


def weights(folder):
    return {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def policy(tmp_path_factory, lines):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHOW_EVERY", 1)
        patch.setattr("april.launch.target.subprocess.Popen", Popen)
        return make_policy(tmp_path_factory.mktemp("policies") / "seed0", 0, SMALL, log=lines.append)


def test_the_folder_is_complete_and_loads_as_any_hugging_face_model(policy, lines):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    ids = tokenizer("05*3+60=", return_tensors="pt").input_ids
    logits = model(input_ids=ids).logits
    assert logits.shape == (1, 8, len(VOCABULARY)) and torch.isfinite(logits).all()
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 1
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    record = orjson.loads((policy / "warm_start.json").read_bytes())
    assert record["seed"] == 0 and record["recipe"]["clean"] == 16 and record["seconds"] > 0
    assert record["config"]["learner"]["optimizer"] == "muon" and record["parameters"] == model.num_parameters()
    assert [path.name for path in policy.parent.iterdir()] == ["seed0"]
    rows = SMALL.easy + SMALL.clean + SMALL.noisy
    assert sum(": loss" in line for line in lines) == rows / record["config"]["sft"]["batch_size"], "each row once"


def test_a_policy_that_is_there_is_returned_at_once(policy, monkeypatch):
    monkeypatch.setattr(module, "trained", None)
    assert make_policy(policy, 0, SMALL) == policy


@pytest.mark.full
def test_a_seed_gives_the_same_weights_again_and_another_seed_replaces_them(policy, tmp_path):
    again = make_policy(tmp_path / "p", 0, SMALL)
    first = weights(again)
    assert same(weights(policy), first)
    assert not same(weights(make_policy(again, 1, SMALL)), first)
    assert orjson.loads((again / "warm_start.json").read_bytes())["seed"] == 1


def test_what_is_interrupted_or_fails_leaves_nothing(tmp_path, monkeypatch):
    for raised in (KeyboardInterrupt, ConfigError):
        monkeypatch.setattr(module, "trained", lambda *_, raised=raised: (_ for _ in ()).throw(raised))
        with pytest.raises(raised):
            make_policy(tmp_path / "p", 0, SMALL)
        assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds something else"):
        make_policy(tmp_path, 0, SMALL)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_demonstrations_never_show_a_held_out_prompt():
    rows = list(demonstrations(100, 200, 100, seed=0))
    assert len(rows) == 400 and rows == list(demonstrations(100, 200, 100, seed=0))
    assert all(split_of(row["prompt"]) == "train" for row in rows)
    assert len({row["prompt"] for row in rows}) > 300
