"""A trainer skips batches that it cannot learn from."""

import math

import pytest
import torch

from april.learner.batch import TrainingBatch
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import flat_batch, job, make_config, poisoned, uneven_batch


def test_a_step_that_is_not_finite_never_reaches_the_optimizer(one_rank, policy_folder, tmp_path):
    trainer = Trainer(make_config(policy_folder, tmp_path), torch.device("cpu"))
    good = uneven_batch(0, policy_folder)
    trainer.step(good)
    before = trainer.weights()
    metrics = trainer.step(poisoned(good))
    assert math.isnan(metrics["loss"])
    assert (metrics["update_skipped"], trainer.step_count, trainer.optimizer_steps) == (1, 2, 1)
    assert equal(trainer.weights(), before)
    assert trainer.step(good)["update_skipped"] == 0
    assert all(value.isfinite().all() for value in trainer.weights().values())


def test_a_step_with_a_finite_loss_and_a_nonfinite_gradient_never_reaches_the_optimizer(
    one_rank, policy_folder, tmp_path, monkeypatch
):
    trainer = Trainer(make_config(policy_folder, tmp_path), torch.device("cpu"))
    before, micro_loss = trainer.weights(), trainer.micro_loss
    monkeypatch.setattr(trainer, "micro_loss", lambda *arguments: math.inf * micro_loss(*arguments))
    metrics = trainer.step(uneven_batch(0, policy_folder))
    assert math.isfinite(metrics["loss"]) and not math.isfinite(metrics["grad_norm"])
    assert (metrics["nonfinite"], metrics["update_skipped"], trainer.optimizer_steps) == (1, 1, 0)
    assert equal(trainer.weights(), before)


@pytest.mark.full
def test_all_ranks_skip_a_step_if_one_of_them_has_no_finite_loss(policy_folder, tmp_path):
    """The steps around the skipped one equal those of a run without it."""
    config, good = make_config(policy_folder, tmp_path / "run"), uneven_batch(0, policy_folder)
    jobs = [job(config, batches) for batches in ([good, poisoned(good), good], [good, good])]
    among, without = run_ranks(2, jobs, tmp_path / "ranks")
    assert [metrics["nonfinite"] for metrics in among["metrics"]] == [0, 1, 0]
    assert among["optimizer_steps"] == 2
    assert equal(among["weights"], without["weights"])


@pytest.mark.parametrize("batch", [flat_batch(0), TrainingBatch(0, [])], ids=["flat", "empty"])
def test_without_anything_to_train_token_means_are_absent_not_zero(one_rank, policy_folder, tmp_path, batch):
    metrics = Trainer(make_config(policy_folder, tmp_path), torch.device("cpu")).step(batch)
    assert not {"entropy", "k3", "clip_fraction", "ratio_mean", "ratio_max"} & metrics.keys()
    assert metrics["update_skipped"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
