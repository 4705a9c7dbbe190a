"""Configurations: files, overrides, presets and paths; and refusals in one sentence with key, value and fix."""

import re
from pathlib import Path

import pytest

from april import config as configuration
from april.config import ConfigError, known_keys
from april.config.loading import SYNONYMS

MINIMAL = """
[model]
path = "{folder}"
[data]
path = "{folder}/train.jsonl"
"""

AUTO = ["--over-sampling-batch-size", "auto"]
PULL = ["--weights.transport", "pull"]
CONTINUOUS = ["--schedule.kind", "continuous"]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL.format(folder=tmp_path))
    return path


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["--schedule.rollout_batch_sise", "4"], ["schedule.rollout_batch_sise", "4", "schedule.rollout_batch_size"]),
        (["--learner.learning_rate", "1e-6"], ["learner.learning_rate", "did you mean 'learner.lr'?"]),
        (["--lr", "1e-6"], ["'lr'", "did you mean 'learner.lr'?"]),
        (["--num-generations", "8"], ["num_generations", "did you mean 'schedule.n_samples_per_prompt'?"]),
        (["--nonsense", "1"], ["nonsense", "1"]),
        (["--learner.lr", "fast"], ["learner.lr", "fast", "number"]),
        (["--broker.bind", "tcp://[::1]:5555"], ["broker.bind", "[::1]", "IPv6", "IPv4"]),
        (["--operations.http", "[::]:0"], ["operations.http", "IPv6"]),
        (["--agent.listen", "::1:8000", "--agent.command", '["true"]'], ["agent.listen", "IPv6"]),
        (["--weights.host", "fe80::1"], ["weights.host", "fe80::1", "IPv6"]),
        ([*PULL, "--weights.every", "2"], ["weights.every", "2", "'april'", "schedule.kind = 'continuous'"]),
        ([*PULL, *CONTINUOUS, "--weights.every", "6"], ["weights.every", "6", "schedule.max_staleness = 5", "lower"]),
        (
            [*PULL, *CONTINUOUS, "--weights.every", "2", "--data.eval_path", "held_out.jsonl"],
            ["weights.every", "2", "held-out prompts", "set it to 1"],
        ),
        (["--weights.every", "2"], ["weights.every", "2", "'collective' does not write", "transport = 'pull'"]),
        (
            ["--weights.transport", "external", "--weights.delta", "auto"],
            ["weights.delta", "auto", "'external' leaves to others", "another transport"],
        ),
        (["--weights.whole_every", "4"], ["weights.whole_every", "4", "'collective' does not write", "'pull'"]),
        ([*PULL, "--weights.whole_every", "4"], ["weights.whole_every", "4", "'off'", "weights.delta = 'auto'"]),
        (["--weights.folder", "/tmp"], ["weights.folder", "/tmp", "'collective' does not write", "'pull'"]),
        ([*PULL, "--weights.folder", "s3://user:secret@host/x"], ["weights.folder", "credentials", "environment"]),
        (["--algorithm.corrections", "none"], ["algorithm.corrections", "--algorithm.corrections '[VALUE, VALUE]'"]),
        (["--seed", str(2**64)], ["seed", str(2**64), "less than"]),
        (["--data.sources", "a.jsonl"], ["data.sources", "a.jsonl", "--data.sources '[VALUE, VALUE]'"]),
        (["--over-sampling-batch-size", "0"], ["schedule.over_sampling_batch_size", "0", "greater than or equal to 1"]),
        (["--learner.minibatches", "33"], ["learner.minibatches", "33", "32 groups", "schedule.rollout_batch_size"]),
        (["--n-samples-per-prompt", "1"], ["schedule.n_samples_per_prompt", "1", "2 or more"]),
        (["--over-sampling-batch-size", "193"], ["over_sampling_batch_size", "193", "192", "max_staleness"]),
        (["--schedule.overlap", "--over-sampling-batch-size", "161"], ["161", "160", "with overlap"]),
        (["--schedule.kind", "sync", "--over-sampling-batch-size", "64"], ["over_sampling_batch_size", "64", "april"]),
        (["--schedule.kind", "psync"], ["schedule.kind", "psync", "mean 'sync'", "'sync', 'april', 'continuous'"]),
        (["--schedule.in_flight", "64"], ["schedule.in_flight", "64", "'continuous'", "'april'"]),
        ([*CONTINUOUS, "--schedule.in_flight", "0"], ["schedule.in_flight", "0", "greater than or equal to 1"]),
        ([*CONTINUOUS, "--schedule.in_flight", "1537"], ["schedule.in_flight", "1537", "1536", "max_staleness"]),
        ([*CONTINUOUS, "--over-sampling-batch-size", "193"], ["over_sampling_batch_size", "193", "192"]),
        (["--over-sampling-batch-size", "many"], ["schedule.over_sampling_batch_size", "many", "integer"]),
        ([*AUTO, "--schedule.kind", "sync"], ["over_sampling_batch_size", "auto", "'sync'", "leave the key out"]),
        ([*AUTO, "--schedule.kind", "continuous"], ["over_sampling_batch_size", "auto", "schedule.in_flight"]),
        (["--schedule.in_flight", "auto"], ["schedule.in_flight", "auto", "schedule.over_sampling_batch_size"]),
        ([*CONTINUOUS, "--no-partial-rollout"], ["schedule.partial_rollout", "false", "'april'"]),
        ([*CONTINUOUS, "--schedule.overlap"], ["schedule.overlap", "true", "'april'"]),
        (["--schedule.min_group_size", "9"], ["min_group_size", "9", "n = 8"]),
        (
            ["--algorithm.proximal", "behaviour", "--algorithm.corrections", '["icepop"]'],
            ["algorithm.corrections", "icepop", "weighs 1", "'recomputed' or 'interpolated'"],
        ),
        (
            ["--algorithm.proximal", "recomputed", "--algorithm.corrections", '["icepop", "truncated"]'],
            ["algorithm.corrections", "twice", "only one"],
        ),
        (["--algorithm.corrections", '["geometric", "geometric"]'], ["algorithm.corrections", "geometric", "once"]),
        (["--algorithm.loss", "gspo", "--algorithm.dual_clip", "3"], ["algorithm.dual_clip", "3", "'ppo'", "'gspo'"]),
        (["--algorithm.constant_tokens", "100"], ["algorithm.constant_tokens", "100", "'constant'", "'token_mean'"]),
        (["--algorithm.icepop_low", "5"], ["algorithm.icepop_low", "5", "algorithm.icepop_high", "lower"]),
        (["--algorithm.preset", "ppo"], ["algorithm.preset", "ppo", "'grpo', 'dapo' or 'gspo'"]),
        (["--sampling.top_p", "0.9"], ["sampling.top_p", "0.9", "'torch'", "biased", "'sglang'"]),
        (["--sampling.top_k", "5"], ["sampling.top_k", "5", "'torch'", "biased", "'sglang'"]),
        (["--sampling.min_p", "0.1"], ["sampling.min_p", "0.1", "'torch'", "biased", "'sglang'"]),
        (["--broker.renew_s", "60"], ["broker.renew_s", "60", "lower"]),
        (["--model.path", "/nowhere"], ["model.path", "/nowhere", "make-policy"]),
        (["--model.path", "Qwen/Qwen3-0.6B"], ["model.path", "`hf download Qwen/Qwen3-0.6B`"]),
        (["--data.path", "/nowhere.jsonl"], ["data.path", "/nowhere.jsonl", "make-data"]),
        (["--data.eval_path", "/nowhere.jsonl"], ["data.eval_path", "/nowhere.jsonl"]),
        (["--model.path.deep", "1"], ["model.path.deep", "'path'", "not a section"]),
        (["stray"], ["stray", "--section.key"]),
        (["--run.name", "a/b"], ["run.name", "a/b", "it should be a folder's name", "without / and"]),
        (["--run.name", ".."], ["run.name", "..", "full stop"]),
        (["--run.name", " run"], ["run.name", "' run'", "space"]),
        (["--learner.lr", "inf"], ["learner.lr", "inf", "finite"]),
        (["--learner.betas", "[2, 3]"], ["learner.betas", "2", "less than 1"]),
        (["--broker.bind", "tcp://127.0.0.1:99999"], ["broker.bind", "99999", "tcp://INTERFACE:PORT"]),
        (["--sampling.max_response_tokens", "2000"], ["max_response_tokens", "2000", "1024", "lower it"]),
        (["--sampling.stop_token_ids", "[-1]"], ["sampling.stop_token_ids", "-1"]),
        (["--reward.overlong_buffer_tokens", "600"], ["reward.overlong_buffer_tokens", "600", "512"]),
        (["--reward.code_memory_mb", "8192"], ["reward.code_memory_mb", "8192", "4096", "raise"]),
        (["--reward.url", "localhost:80"], ["reward.url", "localhost:80", "http://"]),
        (["--reward.url", "http://me:pass@h/score"], ["reward.url", "http://…@h/score", "url_key_variable"]),
        (["--reward.url", "http://h/score?api_key=abc"], ["reward.url", "http://h/score?…", "${NAME}"]),
        (["--reward.url_key_variable", "A B"], ["reward.url_key_variable", "A B"]),
        (["--reward.format_pattern", "("], ["reward.format_pattern", "'('", "regular expression"]),
        (["--data.sources", '[{path = "x.jsonl", weight = 0}]'], ["data.sources.0.weight", "0", "greater than 0"]),
        (["--data.sources", '[{path = "x.jsonl"}]'], ["data.path", "data.sources", "leave one out"]),
        (["--environment.name", "calculator"], ["environment.name", "calculator", "environment.turn_ends"]),
        (["--environment.turn_ends", '["="]'], ["environment.turn_ends", "=", "environment.name"]),
        (["--data.mapping", "squad"], ["data.mapping", "squad", "'dapo_math'"]),
        (["--model", "3"], ["'model'", "3", "[model]"]),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_key_value_and_fix(file, overrides, named):
    with pytest.raises(ConfigError) as refusal:
        configuration.load(file, overrides)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    for part in named:
        assert part in sentence


@pytest.mark.parametrize(
    ("text", "named"), [("[schedule", "not TOML"), ("", "model"), (None, "does not exist")], ids=str
)
def test_a_malformed_or_missing_file_is_refused(tmp_path, text, named):
    if text is not None:
        (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        configuration.load(tmp_path / "bad.toml")


def test_a_process_that_reads_no_prompts_needs_none(file):
    with pytest.raises(ConfigError, match="does not exist"):
        configuration.load(file, ["--data.path", "/nowhere.jsonl"])
    assert configuration.load(file, ["--data.path", "/nowhere.jsonl"], inputs=["model"]).data.path == Path(
        "/nowhere.jsonl"
    )


def test_the_published_flags_have_their_own_names(file):
    flags = ["--rollout-batch-size", "16", "--over-sampling-batch-size=32", "--n-samples-per-prompt", "4"]
    schedule = configuration.load(file, [*flags, "--no-partial-rollout"]).schedule
    assert (schedule.rollout_batch_size, schedule.over_sampling_batch_size, schedule.n_samples_per_prompt) == (
        16,
        32,
        4,
    )
    assert schedule.partial_rollout is False
    assert configuration.load(file, ["--partial-rollout"]).schedule.partial_rollout is True


def test_the_flag_engine_and_the_keys_of_section_engine_do_not_collide(file):
    config = configuration.load(file, ["--engine", "sglang", "--engine.url", "http://a:1", "--engine.pause=abort"])
    assert (config.worker.engine, config.engine.url, config.engine.pause) == ("sglang", ["http://a:1"], "abort")
    assert configuration.load(file, ["--engine=torch"]) == configuration.load(file)


def test_every_key_can_be_overridden_on_the_command_line(file):
    config, overrides = configuration.load(file), []
    for key in configuration.known_keys():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            overrides += [f"--{key}", str(value)]
    assert len(overrides) > 200 and configuration.load(file, overrides) == config


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (["--run.name", "20260105"], "20260105"),
        (["--run.name", "1e3"], "1e3"),
        (["--run.name", "'7'"], "7"),
        (["--samples.groups", "none"], None),
        (["--engine.url", "none"], []),
        (["--operations.http", "none"], "none"),
        (["--data.label_key", "none"], None),
        (["--data.eval_path", "none"], None),
        (["--agent.command", '["python", "agent.py"]'], ["python", "agent.py"]),
    ],
)
def test_an_override_is_what_its_key_takes(file, override, value):
    section, name = override[0].removeprefix("--").split(".")
    assert getattr(getattr(configuration.load(file, override), section), name) == value


def test_none_in_a_file_unsets_a_key_also_for_those_that_read_the_run_s_configuration(file, tmp_path):
    file.write_text(file.read_text() + 'label_key = "none"\n[samples]\ngroups = "none"\n')
    config = configuration.load(file)
    assert config.data.label_key is config.samples.groups is None
    (tmp_path / "written.toml").write_text(config.to_toml())
    assert configuration.load(tmp_path / "written.toml") == config


def test_stale_tokens_are_corrected_by_default(file):
    algorithm = configuration.load(file).algorithm
    assert (algorithm.proximal, algorithm.corrections) == ("recomputed", ("truncated_sequence",))
    assert (algorithm.sequence_truncation, algorithm.behaviour_coef) == (2.0, 0.3)


def test_a_preset_sets_the_keys_of_its_paper(file):
    dapo = configuration.load(file, ["--algorithm.preset", "dapo", "--sampling.max_response_tokens", "500"])
    assert (dapo.algorithm.clip_low, dapo.algorithm.clip_high, dapo.algorithm.kl_coef) == (0.2, 0.28, 0)
    assert (dapo.algorithm.normalisation, dapo.schedule.dynamic_sampling) == ("token_mean", True)
    assert (dapo.reward.overlong_buffer_tokens, dapo.reward.overlong_penalty) == (100, 1.0)
    gspo = configuration.load(file, ["--algorithm.preset", "gspo"])
    assert (gspo.algorithm.loss, gspo.algorithm.clip_low, gspo.algorithm.clip_high) == ("gspo", 3e-4, 4e-4)
    grpo = configuration.load(file, ["--algorithm.preset", "grpo"])
    assert (grpo.algorithm.kl_coef, grpo.algorithm.kl_estimator, grpo.algorithm.clip_high) == (0.04, "k3", 0.2)
    assert (grpo.algorithm.loss, grpo.algorithm.clip_low, grpo.algorithm.normalisation) == ("ppo", 0.2, "sequence_mean")
    assert (gspo.algorithm.normalisation, dapo.algorithm.loss) == ("sequence_mean", "ppo")
    for preset in (dapo, gspo, grpo):
        assert preset.algorithm.advantage == "grpo"
        assert (preset.algorithm.proximal, preset.algorithm.corrections) == ("behaviour", ())
        assert preset.algorithm.behaviour_coef == 0


def test_a_key_that_is_given_wins_over_its_preset(file):
    config = configuration.load(
        file, ["--algorithm.preset", "dapo", "--algorithm.clip_high", "0.4", "--no-schedule.dynamic_sampling"]
    )
    assert (config.algorithm.clip_high, config.algorithm.clip_low) == (0.4, 0.2)
    assert not config.schedule.dynamic_sampling


@pytest.mark.parametrize("preset", [[], *(["--algorithm.preset", name] for name in ("grpo", "dapo", "gspo"))], ids=str)
def test_the_resolved_configuration_reads_back_unchanged(file, tmp_path, preset):
    config = configuration.load(file, ["--seed", "3", "--learner.betas", "[0.8, 0.9]", *preset])
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert configuration.load(tmp_path / "again.toml") == config


def test_paths_in_a_file_are_relative_to_it_and_on_the_command_line_to_the_working_directory(tmp_path, monkeypatch):
    place, here, other = (tmp_path / name for name in ("place", "here", "other"))
    for folder in (place / "model", here, other):
        folder.mkdir(parents=True)
    for path in (place / "train.jsonl", place / "more.jsonl", here / "held out.jsonl"):
        path.touch()
    (place / "model/config.json").write_text("{}")
    (other / "interpreter").symlink_to(here / "held out.jsonl")
    (place / "run.toml").write_text("""
model = { path = "model" }
data = { sources = [{ path = "train.jsonl" }, { path = "../place/more.jsonl", weight = 2 }] }
engine = { python = "../other/interpreter" }
""")
    (other / "more.toml").write_text("schedule = { scenario = 'costs.toml' }")
    monkeypatch.chdir(here)
    overrides = ["--data.eval_path", "held out.jsonl", "--engine.pace", "../other/cost.toml", "--engine", "my:Engine"]
    config = configuration.load([Path("../place/run.toml"), other / "more.toml"], overrides)
    assert config.model.path == place / "model" and config.data.eval_path == here / "held out.jsonl"
    assert [source.path for source in config.data.train_sources] == [place / "train.jsonl", place / "more.jsonl"]
    assert config.engine.python == other / "interpreter", "what an interpreter is called decides what it has"
    assert (config.engine.pace, config.schedule.scenario) == (str(other / "cost.toml"), other / "costs.toml")
    assert config.run_dir == here / "runs/more", "where no file names a folder, a run is where it was started"
    assert config.run.parts == [place, other], "where parts of one's own are"
    (other / "resolved.toml").write_text(config.to_toml())
    monkeypatch.chdir("/")
    assert configuration.load(other / "resolved.toml") == config, "and goes on from anywhere"
    assert configuration.load(other / "resolved.toml", ["--engine.pace", "h100"]).engine.pace == "h100"


def test_help_lists_every_key_with_its_default():
    listing = configuration.describe_keys()
    for key, field in configuration.known_keys().items():
        assert f"--{key} " in listing
        assert field.description in listing


UNITS = {"_s": "(seconds)", "_tokens": "oken", "_mb": "(MiB)", "_gb": "(GiB)", "_gib": "(GiB)", "_tflops": "(TFLOP/s)"}


@pytest.mark.parametrize("key", known_keys())
def test_a_key_s_help_is_sentences_and_names_the_unit(key):
    text = known_keys()[key].description
    assert re.match(r"[A-Z]|[a-zA-Z']+: |https://|fsspec ", text) and text.endswith(".")
    unit = next((unit for suffix, unit in UNITS.items() if key.endswith(suffix)), "")
    assert unit in text


def test_synonyms_name_known_keys():
    assert set(SYNONYMS.values()) <= known_keys().keys()


def test_a_flag_without_its_value_is_refused_unless_it_is_a_switch(file):
    with pytest.raises(ConfigError, match=r"'learner\.lr' has no value"):
        configuration.load(file, ["--learner.lr"])
    assert configuration.load(file, ["--schedule.partial_rollout"]).schedule.partial_rollout
