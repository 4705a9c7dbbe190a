"""What the objective prepares from a batch, and its token metrics by age."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from april.learner.batch import TrainingBatch, TrainSample
from april.learner.batch_metrics import MAX_VERSIONS, version_shares
from april.learner.diagnostics import BY_AGE, StepTotals
from april.learner.losses.ranks import Ranks
from april.learner.objective import Objective, token_ages
from april.learner.trainer import Trainer
from april.wire.message import Version
from tests.support.learner.small_learner import SHIPPED, flat_batch, make_config, make_sample, stale_batch


def objective(tmp_path, **algorithm):
    return Objective(make_config(tmp_path, tmp_path, algorithm=algorithm))


def in_segments(*segments):
    end = segments[-1][1]
    versions = tuple((start, stop, Version(0, step)) for start, stop, step in segments)
    return TrainSample(np.zeros(end + 1, np.int32), 1, np.zeros(end, np.float32), 1.0, versions)


def test_an_age_counts_the_steps_since_the_version_that_sampled_the_token():
    assert token_ages(in_segments((0, 2, 4), (2, 3, 6), (3, 5, 7)), step=7).tolist() == [3, 3, 1, 0, 0]


def test_the_share_of_tokens_by_policy_version():
    samples = [in_segments((0, 1, 4), (1, 4, 6)), in_segments((0, 4, 6))]
    assert version_shares(samples) == {"version_share_6": 7 / 8, "version_share_4": 1 / 8}
    assert version_shares([]) == {}


def test_versions_before_the_newest_share_one_figure():
    samples = [in_segments((0, 1, step)) for step in range(MAX_VERSIONS + 2)]
    shares = version_shares(samples)
    assert len(shares) == MAX_VERSIONS + 1 and sum(shares.values()) == pytest.approx(1)
    assert shares["version_share_older"] == pytest.approx(2 / len(samples))


def test_samples_without_an_advantage_are_trained_only_where_a_penalty_needs_them(tmp_path):
    batch = flat_batch(0)
    assert objective(tmp_path).prepare(batch).samples == []
    for penalty in ("kl_coef", "entropy_coef"):
        assert objective(tmp_path, **{penalty: 0.1}).prepare(batch).samples == batch.samples


def test_a_response_without_tokens_counts_in_its_group_and_trains_nothing(tmp_path):
    rng = np.random.default_rng(0)
    batch = TrainingBatch(0, [[make_sample(rng, 2, 0, 0.0), make_sample(rng, 2, 3, 1.0)]])
    prepared = objective(tmp_path, advantage="dr_grpo", normalisation="sequence_mean").prepare(batch)
    assert prepared.samples == batch.groups[0][1:]
    assert (prepared.advantages.tolist(), prepared.weights.tolist()) == ([0.5], [pytest.approx(1 / 3)])


class OverTheBatch:
    """A part that is a callable object; its class says what it takes."""

    needs_values = over_the_batch = True

    def __call__(self, *_):
        raise NotImplementedError

    def clip_of_batch(self, *_):
        raise NotImplementedError


part = OverTheBatch()


def test_what_a_callable_object_takes_is_said_by_its_class(tmp_path):
    own = f"{__name__}:part"
    assert objective(tmp_path, corrections=(own,)).fixes_loss_inputs
    assert objective(tmp_path, loss=own).clip_of_batch == part.clip_of_batch
    assert objective(tmp_path, advantage=own).needs_values


def session(rng, index, reward, *branches):
    """Rows of one sample: (prompt tokens, response tokens) of each of its forks."""
    rows = [make_sample(rng, prompt, response, reward) for prompt, response in branches]
    return [replace(row, index=index, fork=fork) for fork, row in enumerate(rows)]


def test_a_sample_of_several_forks_counts_once_in_its_group_and_as_one_sequence(tmp_path):
    rng = np.random.default_rng(0)
    rows = [*session(rng, 0, 0.0, (2, 3), (4, 2), (6, 5)), *session(rng, 1, 0.5, (2, 4)), *session(rng, 2, 1.0, (2, 8))]
    prepared = objective(tmp_path, advantage="dr_grpo", normalisation="sequence_mean").prepare(TrainingBatch(0, [rows]))
    assert prepared.batch_advantages.tolist() == [-0.5, -0.5, -0.5, 0.0, 0.5]
    assert prepared.weights.tolist() == pytest.approx([1 / 30] * 3 + [1 / 24]), "3 sequences, of 10 and of 8 tokens"
    assert (prepared.metrics["reward"], prepared.metrics["samples"], prepared.metrics["tokens"]) == (0.5, 3, 22)


def test_a_sequence_loss_sees_each_fork_as_one_sequence_of_its_own_tokens(tmp_path):
    rng = np.random.default_rng(0)
    rows = [*session(rng, 0, 0.0, (2, 3), (4, 2)), *session(rng, 1, 1.0, (2, 4))]
    told = objective(tmp_path, loss="gspo")
    tokens = told.tokens(told.prepare(TrainingBatch(0, [rows])), [0, 1, 2], torch.device("cpu"))
    assert tokens.spans.lengths.tolist() == [3, 2, 4]


def test_figures_by_age_add_up_to_the_whole(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path, algorithm={"corrections": ["geometric"], "geometric_low": 0.9})
    metrics = Trainer(config, torch.device("cpu")).step(stale_batch(policy_folder))
    ages = {int(name.rsplit("_", 1)[1]) for name in metrics if name.startswith("trained_tokens_age_")}
    assert ages == set(range(6)), "versions 1 to 6 train step 6"
    tokens = {age: metrics[f"trained_tokens_age_{age}"] for age in ages}
    assert sum(tokens.values()) == metrics["trained_tokens"]
    for name in BY_AGE:
        mean = sum(metrics[f"{name}_age_{age}"] * count for age, count in tokens.items()) / metrics["trained_tokens"]
        assert mean == pytest.approx(metrics[name]), name
    assert metrics["off_policy_share"] == pytest.approx(1 - tokens[0] / metrics["trained_tokens"])
    assert sum(value for name, value in metrics.items() if name.startswith("version_share")) == pytest.approx(1)


def test_the_default_correction_reports_its_weights_and_caps(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path, algorithm=SHIPPED)
    metrics = Trainer(config, torch.device("cpu")).step(stale_batch(policy_folder))
    assert metrics["clip_fraction"] == metrics["mask_fraction"] == 0
    assert 0 < metrics["truncated_fraction"] < 1 and 0 < metrics["weight_mean"] < config.algorithm.sequence_truncation
    assert 0 < metrics["weight_ess"] < 1 and metrics["weight_ess"] != metrics["ess"]
    assert {"truncated_fraction_age_3", "weight_mean_age_3", "weight_ess_age_3"} <= metrics.keys()


def test_the_effective_sample_shares_by_hand_and_the_last_bucket(one_rank):
    totals = StepTotals(torch.device("cpu"))
    ages, ratio, weight = torch.tensor([0, 8, 30]), torch.tensor([1.0, 1.0, 3.0]), torch.tensor([1.0, 1.0, 2.0])
    totals.add(torch.tensor(0.5), ages, ratio, weight)
    found = totals.reduced(Ranks()).metrics()
    assert found["ess"] == pytest.approx(25 / (3 * 11))
    assert (found["weight_ess"], found["weight_ess_age_0"]) == (pytest.approx(16 / (3 * 6)), 1)
    assert (found["trained_tokens_age_8_up"], found["ess_age_8_up"]) == (2, pytest.approx(16 / (2 * 10)))
    assert (found["loss"], found["ratio_max"], found["off_policy_share"]) == (0.5, 3, pytest.approx(2 / 3))
