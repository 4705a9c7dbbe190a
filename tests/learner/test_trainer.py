"""What a trainer does with a batch that it cannot learn from."""

import math

import numpy as np
import pytest
import torch
from learner_setup import flat_batch, make_config, uneven_batch

from april.learner.batch import Batch, TrainSample
from april.learner.trainer import Trainer


def poisoned(batch: Batch) -> Batch:
    first, *rest = batch.groups[0]
    broken = TrainSample(
        first.tokens, first.prompt_tokens, np.full_like(first.logprobs, np.nan), first.reward, first.segments
    )
    return Batch(batch.step, [[broken, *rest], *batch.groups[1:]])


def test_a_step_that_is_not_finite_never_reaches_the_optimizer(one_rank, policy_folder, tmp_path):
    trainer = Trainer(make_config(policy_folder, tmp_path), torch.device("cpu"))
    good = uneven_batch(0, policy_folder)
    trainer.step(good)
    before = trainer.weights()
    metrics = trainer.step(poisoned(good))
    assert math.isnan(metrics["loss"])
    assert (metrics["update_skipped"], trainer.step_count, trainer.optimizer_steps) == (1, 2, 1)
    assert all(torch.equal(value, before[name]) for name, value in trainer.weights().items())
    assert trainer.step(good)["update_skipped"] == 0
    assert all(value.isfinite().all() for value in trainer.weights().values())


@pytest.mark.parametrize("batch", [flat_batch(0), Batch(0, [])], ids=["flat", "empty"])
def test_without_anything_to_train_token_means_are_absent_not_zero(one_rank, policy_folder, tmp_path, batch):
    metrics = Trainer(make_config(policy_folder, tmp_path), torch.device("cpu")).step(batch)
    assert not {"entropy", "k3", "clip_fraction", "ratio_mean", "ratio_max"} & metrics.keys()
    assert metrics["update_skipped"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
