"""The quickstart policy's folder: whole, loadable, the same for the same seed."""

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.config import ConfigError
from april.data.arithmetic import ArithmeticTask, demonstration, split_of
from april.learner.policy import warm_start as module
from april.learner.policy.warm_start import (
    PAD,
    VOCABULARY,
    Recipe,
    batches,
    build_model,
    build_tokenizer,
    make_policy,
    padded,
)

SMALL = Recipe(hidden_size=64, layers=1, easy_steps=8, clean_steps=6, noisy_steps=6, batch_tokens=128)


def weights(folder):
    return {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policies") / "seed0", 0, SMALL, log=lambda line: None)


def test_the_folder_loads_as_any_hugging_face_model(policy):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    ids = tokenizer("05*3+60=", return_tensors="pt").input_ids
    logits = model(input_ids=ids).logits
    assert logits.shape == (1, 8, len(VOCABULARY)) and torch.isfinite(logits).all()
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 1
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_quickstart_policy_has_half_a_million_parameters():
    recipe = Recipe()
    assert build_model(recipe.hidden_size, recipe.layers, 0).num_parameters() == 526_272


def test_every_character_is_one_token_and_comes_back():
    tokenizer = build_tokenizer()
    text = "".join(character for character in VOCABULARY if len(character) == 1)
    assert tokenizer.encode(text) == list(range(2, 71))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_keeps_the_stride_of_eight_tokens():
    message = [{"role": "user", "content": "05*3+60="}]
    ids = build_tokenizer().apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 8


def test_a_seed_gives_the_same_weights_again_and_another_seed_others(policy, tmp_path):
    again = make_policy(tmp_path / "again", 0, SMALL, log=lambda line: None)
    other = make_policy(tmp_path / "other", 1, SMALL, log=lambda line: None)
    assert same(weights(policy), weights(again))
    assert not same(weights(policy), weights(other))


def test_a_policy_that_is_there_is_returned_at_once(policy, monkeypatch):
    monkeypatch.setattr(module, "warm_start", None)
    assert make_policy(policy, 0, SMALL) == policy


def test_another_recipe_replaces_the_policy(tmp_path):
    lines = []
    make_policy(tmp_path / "p", 0, SMALL, log=lines.append)
    make_policy(tmp_path / "p", 1, SMALL, log=lines.append)
    assert orjson.loads((tmp_path / "p" / "warm_start.json").read_bytes())["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_the_record_says_how_the_policy_was_made(policy):
    record = orjson.loads((policy / "warm_start.json").read_bytes())
    assert record["seed"] == 0
    assert record["recipe"]["clean_steps"] == 6 and record["recipe"]["noise"]["p_short"] > 0
    assert record["seconds"] > 0


def test_an_interrupted_call_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "warm_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_policy(tmp_path / "p", 0, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds something else"):
        make_policy(tmp_path, 0, SMALL)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_progress_names_step_loss_and_seconds(tmp_path):
    lines = []
    make_policy(tmp_path / "p", 0, SMALL, log=lines.append)
    assert any("step 20/20" in line and "loss" in line and " s" in line for line in lines)


def test_the_warm_start_takes_exactly_its_steps_and_never_sees_a_held_out_prompt():
    text, recipe = build_tokenizer(), Recipe(easy_steps=9, clean_steps=8, noisy_steps=7)
    seen = list(batches(recipe, seed=0))
    assert len(seen) == recipe.steps
    prompts = {text.decode(row[:8]) for tokens, _ in seen for row in tokens}
    assert len(prompts) > 300
    assert all(split_of(prompt) == "train" for prompt in prompts)


def test_only_the_response_is_a_target():
    task = ArithmeticTask(1, 3, 6)
    tokens, targets = padded([(task.prompt, demonstration(task)), (task.prompt, "#12")])
    pad = VOCABULARY[PAD]
    assert targets[0].tolist() == [pad] * 7 + [VOCABULARY[c] for c in "00*3+90=#90"] + [1]
    assert targets[1].tolist() == [pad] * 7 + [VOCABULARY[c] for c in "#12"] + [1] + [pad] * 8
    assert tokens[1].tolist() == [VOCABULARY[c] for c in "01*3+60=#12"] + [pad] * 8
