"""slime's rollout function on April's rollouts: its options keep their names, its samples come back filled."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from april.config import ConfigError, load
from april.data.support import Support
from april.learner.batch import TrainingBatch, TrainSample
from april.trainers.rollouts import LOCAL, connect
from april.trainers.rollouts.prompts import PromptEncoder
from april.trainers.rollouts.run import Rollouts
from april.wire.message import Version
from tests.support import slime_types
from tests.support.recording_broker import RecordingBroker
from tests.support.run_processes import assert_closed
from tests.support.slime_types import Sample, Source, train_data

SUBMITTED = {"data.source": "submitted", "evaluation.prompts": 1}


@pytest.fixture
def slime(monkeypatch):
    """The adapter, where slime would be installed."""
    slime_types.install(monkeypatch, evaluate=lambda args, rollout_id, source, evaluation: ("theirs", evaluation))
    monkeypatch.delitem(sys.modules, "april.trainers.adapters.slime", raising=False)
    yield importlib.import_module("april.trainers.adapters.slime")
    sys.modules.pop("april.trainers.adapters.slime", None)


@pytest.fixture
def args(tmp_path, config_file):
    """slime's options for the small configuration."""
    return SimpleNamespace(
        rollout_batch_size=4, over_sampling_batch_size=6, n_samples_per_prompt=2, partial_rollout=True, num_rollout=3,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_max_response_len=24, dynamic_sampling_filter_path=None,
        reward_key=None, start_rollout_id=None, save=str(tmp_path / "saved"),
        update_weight_disk_dir=str(tmp_path / "weights"), run_config=str(config_file),
    )  # fmt: skip


def write_weights(args, number, tensors):
    folder = Path(args.update_weight_disk_dir, f"weight_v{number:06d}")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")


def flat(groups):
    return [sample for group in groups for sample in group]


def test_a_sample_of_slime_s_gets_tokens_masks_versions_and_the_support_of_each_token(slime, args, config_file):
    config = load(config_file, ["--data.source", "submitted"])
    broker = RecordingBroker(3)
    run = Rollouts(config, 0, broker, broker)
    owner = slime.SlimeRollouts(args, run)
    write_weights(args, 1, {"weight": torch.ones(2)})
    source = Source(2)
    prompt = slime.prompt_of(Source(2).get_samples(1)[0])
    [encoded] = PromptEncoder(config, keeps_files=False).encode([prompt])
    extra = encoded.submission.extra
    support = Support(np.array([2, 0, 1], np.int32), np.array([7, 9, 8], np.int32))
    tokens = np.array([5, 6, 7, 4, 8], np.int32)
    segments = ((0, 1, Version(0, 3)), (2, 3, Version(0, 4)))
    sampled = TrainSample(tokens, 2, np.array([-1, 0, -2], np.float32), 1.0, segments, support, finish_reason="length")
    broker.fetch = lambda step: TrainingBatch(step, [[sampled, sampled]], [(0, extra)])
    output = owner.generate(0, source)
    [[first, second]] = output.samples
    assert (first.tokens, first.response_length, first.loss_mask) == ([5, 6, 7, 4, 8], 3, [1, 0, 1])
    assert first.rollout_log_probs == [-1, 0, -2] and first.weight_versions == ["3", "4"]
    assert (first.reward, first.status) == (1.0, Sample.Status.TRUNCATED)
    assert (first.group_index, first.index, second.index, first.label) == (0, 0, 1, "0")
    assert (first.rollout_top_p_token_ids, first.rollout_top_p_token_offsets) == ([7, 9, 8], [0, 2, 2, 3])
    assert train_data([first, second], top_p=0.9)["truncated"] == [1, 1]
    assert broker.calls.count(("publish", 0)) == 1 and broker.prompts >= 6, "N' groups are on the way"


def test_options_that_do_not_fit_the_run_are_refused_by_slime_s_own_names(slime, args, config_file):
    config = load(config_file, ["--data.source", "submitted"])
    slime.check(args, config)
    for name in ("rollout_batch_size", "over_sampling_batch_size", "n_samples_per_prompt", "num_rollout"):
        with pytest.raises(ConfigError, match=f"'--{name.replace('_', '-')}' is 17 "):
            slime.check(SimpleNamespace(**vars(args) | {name: 17}), config)
    spread = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    filtered = SimpleNamespace(**vars(args) | {"dynamic_sampling_filter_path": spread})
    with pytest.raises(ConfigError, match=r"'--dynamic-sampling-filter-path' is True .*False"):
        slime.check(filtered, config)
    slime.check(filtered, load(config_file, ["--data.source", "submitted", "--schedule.dynamic_sampling", "true"]))
    with pytest.raises(ConfigError, match=r"'--dynamic-sampling-filter-path' = 'mine\.fn' .*schedule\.group_filter"):
        slime.check(SimpleNamespace(**vars(args) | {"dynamic_sampling_filter_path": "mine.fn"}), config)
    with pytest.raises(ConfigError, match="slime brings"):
        slime.check(args, load(config_file))
    assert slime.generate_rollout(args, 0, None, evaluation=True) == ("theirs", True)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_slime_takes_its_own_prompts_and_goes_on_from_its_checkpoint(slime, args, config_file, policy_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    write_weights(args, 1, {name: tensor.clone() for name, tensor in model.named_parameters()})
    overrides = SUBMITTED
    owner = slime.SlimeRollouts(args, connect(config_file, 0, LOCAL, overrides))
    source, seen = Source(2), []
    with owner.run:
        for rollout_id in range(2):
            seen.append(owner.generate(rollout_id, source).samples)
            if rollout_id == 0:
                (tmp_path / "saved").mkdir()
                (tmp_path / "saved" / slime.LATEST_FILE).write_text("0")
                at_checkpoint = source.groups
    again = slime.SlimeRollouts(args, connect(config_file, 1, LOCAL, overrides))
    source = Source(2, at_checkpoint)
    samples = again.generate(1, source).samples
    assert train_data(flat(samples)) == train_data(flat(seen[1])), "the same batch comes again"
    last = again.generate(2, source).samples
    again.finish()
    groups = [group[0].group_index for batch in (*seen, last) for group in batch]
    assert len(groups) == len(set(groups)) == 12
    for group in (group for batch in (*seen, last) for group in batch):
        assert {sample.prompt for sample in group} == {f"{group[0].group_index % 64:02d}*3+60="}
        assert [sample.index for sample in group] == [2 * group[0].group_index, 2 * group[0].group_index + 1]
    assert assert_closed(again.run.config.run_dir)["state"] == "finished"
