"""A configuration that cannot work is refused with one sentence: the key, the value, the mend."""

import pytest

from april import config as configuration
from april.config import ConfigError

MINIMAL = """
[model]
path = "{folder}"
[data]
path = "{folder}/train.jsonl"
"""

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
        (["--nonsense", "1"], ["nonsense", "1"]),
        (["--learner.lr", "fast"], ["learner.lr", "fast", "number"]),
        (["--over-sampling-batch-size", "0"], ["schedule.over_sampling_batch_size", "0", "greater than or equal to 1"]),
        (["--n-samples-per-prompt", "1"], ["schedule.n_samples_per_prompt", "1", "2 or more"]),
        (["--learner.ranks", "3", "--rollout-batch-size", "4"], ["learner.ranks", "3", "divisor"]),
        (["--over-sampling-batch-size", "193"], ["over_sampling_batch_size", "193", "192", "max_staleness"]),
        (["--schedule.overlap", "--over-sampling-batch-size", "161"], ["161", "160", "with overlap"]),
        (["--schedule.kind", "sync", "--over-sampling-batch-size", "64"], ["over_sampling_batch_size", "64", "april"]),
        (["--schedule.kind", "psync"], ["schedule.kind", "psync", "'sync', 'april' or 'continuous'"]),
        (["--schedule.in_flight", "64"], ["schedule.in_flight", "64", "'continuous'", "'april'"]),
        ([*CONTINUOUS, "--schedule.in_flight", "0"], ["schedule.in_flight", "0", "greater than or equal to 1"]),
        ([*CONTINUOUS, "--schedule.in_flight", "1537"], ["schedule.in_flight", "1537", "1536", "max_staleness"]),
        ([*CONTINUOUS, "--over-sampling-batch-size", "193"], ["over_sampling_batch_size", "193", "192"]),
        ([*CONTINUOUS, "--no-partial-rollout"], ["schedule.partial_rollout", "False", "'april'"]),
        ([*CONTINUOUS, "--schedule.overlap"], ["schedule.overlap", "True", "'april'"]),
        (["--schedule.min_group_size", "9"], ["min_group_size", "9", "n = 8"]),
        (["--sampling.top_p", "0.9"], ["sampling.top_p", "0.9", "biased"]),
        (["--sampling.top_k", "5"], ["sampling.top_k", "5", "biased"]),
        (["--broker.renew_s", "60"], ["broker.renew_s", "60", "lower"]),
        (["--model.path", "/nowhere"], ["model.path", "/nowhere", "make-policy"]),
        (["--data.path", "/nowhere.jsonl"], ["data.path", "/nowhere.jsonl", "make-data"]),
        (["--data.eval_path", "/nowhere.jsonl"], ["data.eval_path", "/nowhere.jsonl"]),
        (["--model.path.deep", "1"], ["model.path.deep", "'path'", "not a section"]),
        (["stray"], ["stray", "--section.key"]),
        (["--run.name", "a/b"], ["run.name", "a/b", "it should match"]),
        (["--run.name", ".."], ["run.name", ".."]),
        (["--learner.lr", "inf"], ["learner.lr", "inf", "finite"]),
        (["--learner.betas", "[2, 3]"], ["learner.betas", "2", "less than 1"]),
        (["--broker.bind", "tcp://127.0.0.1:99999"], ["broker.bind", "99999", "tcp://INTERFACE:PORT"]),
        (["--sampling.max_response_tokens", "2000"], ["max_response_tokens", "2000", "1024", "lower it"]),
        (["--sampling.stop_token_ids", "[-1]"], ["sampling.stop_token_ids", "-1"]),
        (["--model", "3"], ["'model'", "3", "[model]"]),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(file, overrides, named):
    with pytest.raises(ConfigError) as refusal:
        configuration.load(file, overrides)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    for part in named:
        assert part in sentence


@pytest.mark.parametrize(("text", "named"), [("[schedule", "not TOML"), ("", "model")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, named):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        configuration.load(tmp_path / "bad.toml")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        configuration.load(tmp_path / "none.toml")


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


def test_every_key_can_be_overridden_on_the_command_line(file):
    config = configuration.load(file)
    for key in configuration.known_keys():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            assert configuration.load(file, [f"--{key}", str(value)]) == config


def test_the_resolved_configuration_reads_back_unchanged(file, tmp_path):
    config = configuration.load(file, ["--seed", "3", "--learner.betas", "[0.8, 0.9]"])
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert configuration.load(tmp_path / "again.toml") == config


def test_help_lists_every_key_with_its_default():
    listing = configuration.describe_keys()
    for key, field in configuration.known_keys().items():
        assert f"--{key} " in listing
        assert field.description in listing
