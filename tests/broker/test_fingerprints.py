"""A run can be resumed only with the start model, tokeniser, chat template, reward and evaluation that it began with. A
difference is refused before the run folder changes, by key and both values; the same input at another path is no
difference."""

import shutil

import msgspec
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from april import config as configuration
from april.broker import header
from april.broker.journal.journal import Journal
from april.config import ConfigError
from april.launch.preflight import check_resume
from april.simulate.trace import recorded_header
from april.util.versions import RUN_FOLDER
from tests.support.broker_conversation import Conversation


@pytest.fixture
def begun(config_file, policy_folder, data_folder, tmp_path):
    """Begin a run on copies of its inputs, which a test may change; `begun(*overrides)` returns the run's
    configuration."""
    shutil.copytree(policy_folder, tmp_path / "policy")
    shutil.copytree(data_folder, tmp_path / "data")
    text = config_file.read_text().replace(str(policy_folder), f"{tmp_path}/policy")
    config_file.write_text(text.replace(str(data_folder), f"{tmp_path}/data"))
    talk = Conversation(configuration.load(config_file))
    talk.journal.close()
    RUN_FOLDER.claim(talk.config.run_dir, new=True)
    return lambda *overrides: configuration.load(config_file, list(overrides))


def change_a_weight(folder):
    path = folder / "policy" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[1] += 0.5
    save_file(tensors, path, {"format": "pt"})


def change_json(folder, name, **keys):
    path = folder / name
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | keys))


def change_the_held_out(folder):
    path = folder / "data" / "heldout.jsonl"
    path.write_text(path.read_text().replace("00*3", "99*3", 1))


def change_the_vocabulary(folder):
    path = folder / "policy" / "tokenizer.json"
    tree = orjson.loads(path.read_bytes())
    tree["added_tokens"] = [token | {"lstrip": not token["lstrip"]} for token in tree["added_tokens"]]
    path.write_bytes(orjson.dumps(tree))


OTHERS = {
    "model.path (weights)": change_a_weight,
    "model.path (config.json)": lambda folder: change_json(folder, "policy/config.json", rms_norm_eps=0.5),
    "model.path (tokeniser)": change_the_vocabulary,
    "model.path (chat template)": lambda folder: (folder / "policy" / "chat_template.jinja").write_text("!"),
    "data.eval_path (prompts)": change_the_held_out,
    "reward.overlong_penalty": ["--reward.overlong_penalty", "0.5"],
    "reward.name": ["--reward.name", "exact"],
    "reward.part": ["--reward.part", '{right = {verifier = "exact"}}'],
    "reward.format_pattern": ["--reward.format_pattern", "#[01]"],
    "data.template_options": ["--data.template_options.enable_thinking", "true"],
}


@pytest.mark.parametrize("key", OTHERS)
def test_a_resume_with_changed_inputs_is_refused_by_key_before_the_folder_changes(begun, tmp_path, key):
    run_dir, change = begun().run_dir, OTHERS[key]
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    config = begun() if callable(change) else begun(*change)
    if callable(change):
        change(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_resume(config)
    sentence = str(refused.value)
    assert f"key {key!r} was '" in sentence and "' now" in sentence and sentence.count("key ") == 1
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_moved_copied_or_resharded_inputs_have_the_same_fingerprint(begun, tmp_path):
    config = begun()
    shutil.move(tmp_path / "policy", tmp_path / "moved")
    tensors = load_file(tmp_path / "moved" / "model.safetensors")
    (tmp_path / "moved" / "model.safetensors").unlink()
    for number in range(2):
        part = {name: tensor for index, (name, tensor) in enumerate(sorted(tensors.items())) if index % 2 == number}
        save_file(part, tmp_path / "moved" / f"model-{number}.safetensors")
    change_json(tmp_path, "moved/config.json", transformers_version="99", _name_or_path="elsewhere")
    shutil.move(config.run.dir, tmp_path / "other_runs")
    moved = ["--model.path", f"{tmp_path}/moved", "--run.dir", f"{tmp_path}/other_runs"]
    kept = ["--learner.lr", "0.5", "--schedule.max_steps", "9", "--reward.timeout_s", "99", "--reward.processes", "2"]
    check_resume(begun(*moved, *kept))


def test_a_broker_without_the_weights_resumes(begun, tmp_path):
    """A broker on a separate machine has only the tokeniser."""
    (tmp_path / "policy" / "model.safetensors").unlink()
    talk = Conversation(begun())
    assert talk.ledger.serials.starts == 2 and "model.path (weights)" in talk.ledger.header.fingerprints


def test_a_run_without_recorded_fingerprints_resumes(begun):
    folder = begun().run_dir / "journal"
    without = msgspec.structs.replace(recorded_header(folder), fingerprints={})
    shutil.rmtree(folder)
    journal = Journal(folder)
    journal.append(without)
    journal.close()
    check_resume(begun("--reward.overlong_penalty", "0.5"))


def test_large_weights_are_distinguished_by_samples_of_every_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(header, "WHOLE_WEIGHTS_BYTES", 1000)
    tensors = {f"layer.{number}": torch.full((3000,), float(number)) for number in range(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    first = header.weights_fingerprint(tmp_path)
    assert first.endswith("of 5 tensors, 60000 bytes") and header.weights_fingerprint(tmp_path) == first
    tensors["layer.3"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert header.weights_fingerprint(tmp_path) != first


@pytest.mark.parametrize("content", [b"", b"not weights", b"\xff" * 100, b"\x02" + bytes(7) + b"[]"])
def test_unreadable_weights_are_a_configuration_error(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"no safetensors file"):
        header.weights_fingerprint(tmp_path)
