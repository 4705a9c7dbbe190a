import shutil
import socket

import orjson
import pytest

from april.cli import main
from april.config import ConfigError, load
from april.config.hub import Fetcher
from april.data.dataset import load_dataset
from april.util.text import format_bytes
from tests.support.hub import use

CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: [{split: train, path: socratic/*.jsonl}]
---
# Questions
"""


def write(folder, **files):
    """Write files into a folder, and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def rows(*labels):
    return b"".join(orjson.dumps({"prompt": f"say {label}", "label": label}) + b"\n" for label in labels)


@pytest.fixture
def model(tmp_path, policy_folder):
    """The small policy, with files beside it that nobody reads."""
    files = {path.name: path.read_bytes() for path in policy_folder.iterdir()}
    return write(tmp_path / "model", **files, **{"pytorch_model.bin": "old", "original/params.json": "{}"})


@pytest.fixture
def questions(tmp_path):
    files = {
        "README.md": CARD,
        "main/train-00000-of-00002.jsonl": rows("one"),
        "main/train-00001-of-00002.jsonl": rows("two"),
        "main/test-00000-of-00001.jsonl": rows("three"),
        "socratic/all.jsonl": rows("four"),
    }
    return write(tmp_path / "questions", **files)


@pytest.fixture
def named(tmp_path, hub, model, questions):
    """A configuration that names a model and a dataset of the hub."""
    hub.push("model", "lab/tiny", model)
    hub.push("dataset", "lab/questions", questions)
    text = f"""
run = {{ name = "named", dir = "{tmp_path}/runs" }}
model = {{ path = "lab/tiny" }}
data = {{ path = "lab/questions", configuration = "main", eval_path = "lab/questions" }}
sampling = {{ max_response_tokens = 24 }}
"""
    (tmp_path / "named.toml").write_text(text)
    return tmp_path / "named.toml"


def labels(config, sources):
    dataset = load_dataset(sources, config.data)
    return [dataset[index].label for index in range(len(dataset))]


def record(config):
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.toml").write_text(config.to_toml())


def test_a_launcher_fetches_what_names_mean_and_parts_find_it_without_a_hub(named, hub, monkeypatch):
    config = load(named, fetch=Fetcher("weights", "rows"))
    assert hub.fetched() == {
        "README.md", "main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl",
        "main/test-00000-of-00001.jsonl", "chat_template.jinja", "config.json", "generation_config.json",
        "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
    record(config)
    asked = len(hub.asked)
    part = load(config.run_dir / "config.toml")
    assert len(hub.asked) == asked and part.model.path.is_dir() and part.model == config.model
    assert labels(part, part.data.train_sources) == ["one", "two"]
    assert labels(part, part.data.eval_sources) == ["three"]
    assert 'path = "lab/tiny"' in config.to_toml() and part.to_toml() == config.to_toml()
    assert part.commits == {
        "model.revision": hub.branches["model", "lab/tiny"]["main"],
        **dict.fromkeys(("data.revision", "data.eval_revision"), hub.branches["dataset", "lab/questions"]["main"]),
    }
    assert load(named).commits == part.commits and len(hub.asked) == asked  # a part that was started by hand
    use(monkeypatch, hub.address, config.run_dir / "another machine's")
    with pytest.raises(ConfigError, match=rf"hf download lab/tiny --revision {part.model.commit}`"):
        load(config.run_dir / "config.toml")
    with pytest.raises(
        ConfigError, match=rf"hf download lab/questions --repo-type dataset --revision {part.data.commit}`"
    ):
        load(config.run_dir / "config.toml", inputs=["data"])


def test_a_moved_branch_moves_new_runs_and_no_resumed_one(named, hub, model):
    before = load(named, fetch=Fetcher("weights", "rows"))
    record(before)
    (model / "generation_config.json").write_text("{}")
    after = hub.push("model", "lab/tiny", model)

    def resolved(file, *overrides, resumed=True):
        return load(file, overrides, (), fetch=Fetcher("commit", "commit"), resumed=resumed).model.commit

    assert resolved(named) == resolved(before.run_dir / "config.toml") == before.model.commit
    assert resolved(named, resumed=False) == after
    for file in (named, before.run_dir / "config.toml"):
        assert resolved(file, "--model.revision", after) == after


def test_a_dry_run_fetches_no_weights_and_says_what_is_to_fetch(named, hub, model):
    fetcher = Fetcher("tokenizer", "rows")
    load(named, fetch=fetcher)
    size = format_bytes((model / "model.safetensors").stat().st_size)
    assert "model.safetensors" not in hub.fetched()
    assert fetcher.facts[0] == f"lab/tiny at {hub.branches['model', 'lab/tiny']['main']}, of which {size} are to fetch"


def test_a_plan_fetches_what_it_reads_and_no_weights(named, hub, capsys):
    assert main(["plan", str(named), "--gpu", "80"]) == 0 and "this fits" in capsys.readouterr().out
    assert {"config.json"} < hub.fetched() and "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    "card",
    ["configs: text", "configs: [text]", "configs: [{data_files: [text, 3]}]", "configs: [{data_files: 3}]", "text"],
)
def test_what_makes_no_sense_in_a_card_is_skipped(named, tmp_path, model, card):
    write(folder := tmp_path / "local", **{"README.md": f"---\n{card}\n---\n", "train.jsonl": rows("a")})
    words = [("path", folder), ("split", "train"), ("configuration", "none"), ("eval_path", "none")]
    config = load(named, [f"--model.path={model}", *(f"--data.{key}={value}" for key, value in words)])
    assert labels(config, config.data.train_sources) == ["a"]


def test_a_local_folder_of_the_name_wins(named, hub, model):
    write(named.parent / "lab" / "tiny", **{path.name: path.read_bytes() for path in model.iterdir() if path.is_file()})
    assert load(named, fetch=Fetcher("weights", "rows")).model.path == named.parent / "lab" / "tiny"
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("overrides", "named_parts"),
    [
        (["--model.path", "lab/none"], ["'model.path' = 'lab/none'", "no file or folder", "no model at", "HF_TOKEN"]),
        (["--data.path", "lab/none"], ["'data.path' = 'lab/none'", "no file or folder", "no dataset at"]),
        (["--model.path", "lab/gated"], ["'model.path' = 'lab/gated'", "gated", "/lab/gated", "HF_TOKEN"]),
        (["--model.path", "lab/bare"], ["'model.path' = 'lab/bare'", "no weights *.safetensors"]),
        (["--model.revision", "v9"], ["'model.revision' = 'v9'", "no branch, tag or commit", "/lab/tiny"]),
        (["--model.commit", "0" * 40], [f"'model.commit' = '{'0' * 40}'", "no branch, tag or commit", "/lab/tiny"]),
        (["--data.configuration", "other"], ["'data.configuration' = 'other'", "main, socratic"]),
        (["--data.split", "dev"], ["'data.split' = 'dev'", "test, train"]),
        (["--data.eval_path", "lab/plain"], ["'data.eval_split'", "extra, train"]),
        (["--data.path", "lab/empty"], ["'data.path'", "without JSONL"]),
    ],
)
def test_names_that_cannot_be_fetched_are_refused(named, hub, tmp_path, model, overrides, named_parts):
    hub.push("model", "lab/gated", model)
    hub.gated["lab/gated"] = "a token that this process has not"
    hub.push("model", "lab/bare", write(tmp_path / "bare", **{"config.json": "{}"}))
    hub.push("dataset", "lab/empty", write(tmp_path / "empty", **{"README.md": "# none", "rows.csv": "a,b"}))
    two = {"train-00000-of-00001.jsonl": rows("a"), "extra-00000-of-00001.jsonl": rows("b")}
    hub.push("dataset", "lab/plain", write(tmp_path / "plain", **two))
    with pytest.raises(ConfigError) as refusal:
        load(named, overrides, fetch=Fetcher("weights", "rows"))
    assert "\n" not in str(refusal.value)
    assert [part for part in named_parts if part not in str(refusal.value)] == [], refusal.value


def test_a_gated_model_is_read_with_the_token_of_the_environment(named, hub, monkeypatch):
    hub.gated["lab/tiny"] = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"gated .*with the token") as refusal:
        load(named, fetch=Fetcher("weights", "rows"))
    assert "hf_wrong" not in str(refusal.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert load(named, fetch=Fetcher("weights", "rows")).model.path.is_dir()


def test_a_closed_port_and_the_offline_switch_leave_the_cache(named, hub, tmp_path, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for address, offline, why in ((nobody, False, nobody), (hub.address, True, "HF_HUB_OFFLINE is set")):
            use(monkeypatch, address, tmp_path / "empty", offline)
            with pytest.raises(ConfigError, match=rf"{why}.*hf download lab/tiny`"):
                load(named, fetch=Fetcher("weights", "rows"))
        use(monkeypatch, hub.address, tmp_path / "cache")
        fetched = load(named, fetch=Fetcher("weights", "rows"))
        for address, offline in ((nobody, False), (hub.address, True)):
            use(monkeypatch, address, offline=offline)
            assert load(named, fetch=Fetcher("weights", "rows")) == fetched
        shutil.rmtree(fetched.model.path.parents[1] / "trees")  # as of a cache that others have filled
        assert load(named, fetch=Fetcher("weights", "rows")) == fetched
        (fetched.model.path / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=rf"hf download lab/tiny --revision {fetched.model.commit}`"):
            load(named, fetch=Fetcher("weights", "rows"))


@pytest.mark.full
def test_an_interrupted_download_is_told_and_goes_on_at_the_next_start(named, hub):
    hub.cut_at = 2000
    with pytest.raises(ConfigError, match=r"has failed \(.*\).*hf download lab/tiny"):
        load(named, fetch=Fetcher("weights", "rows"))
    hub.cut_at = None
    assert load(named, fetch=Fetcher("weights", "rows")).model.path.is_dir()


def test_sources_and_sets_of_held_out_prompts_have_names_too(named, hub):
    sources = '[{path = "lab/questions", configuration = "socratic"}, {path = "lab/questions", configuration = "main"}]'
    held_out = '{first = {path = "lab/questions", configuration = "main"}}'
    words = [
        "--data.path", "none", "--data.sources", sources, "--evaluation.sets", held_out, "--data.eval_path", "none",
    ]  # fmt: skip
    record(config := load(named, [*words, "--data.configuration", "none"], fetch=Fetcher("weights", "rows")))
    part = load(config.run_dir / "config.toml")
    assert labels(part, part.data.train_sources) == ["four", "one", "two"]
    assert labels(part, [part.evaluation_sets[0].source]) == ["three"]
    assert list(part.commits) == [
        "model.revision", "data.sources.0.revision", "data.sources.1.revision", "evaluation.sets.first.revision"
    ]  # fmt: skip
