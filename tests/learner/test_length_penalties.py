"""Length penalties among the responses of a group, by their formulas, and where they count."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from april.config import Config, ConfigError
from april.config.checks import check
from april.learner.batch import TrainingBatch
from april.learner.losses.length import alp, kimi
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from april.trainers.rollouts.batch import to_tensors
from tests.support.learner.small_learner import make_sample


def of_kimi(rewards, lengths):
    low, high = min(lengths), max(lengths)
    share = [0.5 - (length - low) / (high - low) if high > low else 0.0 for length in lengths]
    return [each if reward > 0 else min(0.0, each) for reward, each in zip(rewards, share, strict=True)]


def of_alp(rewards, lengths):
    solved = sum(reward > 0 for reward in rewards) / len(rewards)
    return [-length * max(solved, 1 / len(rewards)) for length in lengths]


@pytest.mark.parametrize("penalty, reference", [(kimi, of_kimi), (alp, of_alp)])
def test_a_penalty_is_its_formula_on_random_groups(penalty, reference):
    rng = np.random.default_rng(0)
    rewards = [rng.integers(-1, 2, size).astype(float) for size in (8, 3, 1, 5)]
    lengths = [rng.integers(1, 100, len(group)).astype(float) for group in rewards]
    lengths[3][:] = 7.0
    found = penalty([torch.from_numpy(each) for each in rewards], [torch.from_numpy(each) for each in lengths])
    for one, *group in zip(found, rewards, lengths, strict=True):
        np.testing.assert_allclose(one, reference(*group), rtol=1e-9, atol=1e-9)
    nothing = torch.zeros(0, dtype=torch.float64)
    assert [each.tolist() for each in penalty([nothing], [nothing])] == [[]]


def made(**algorithm):
    tree = {"model": {"path": Path()}, "data": {"path": "rows.jsonl"}}
    return Config.model_validate(tree | {"algorithm": {"length_penalty": "kimi", "length_coef": 0.5} | algorithm})


def test_it_is_added_to_the_rewards_before_advantages_are_made_also_for_trainers_of_one_s_own():
    rng = np.random.default_rng(1)
    shapes = ((3, 1.0), (9, 1.0), (5, 0.0))
    group = [replace(make_sample(rng, 2, *shape), index=index) for index, shape in enumerate(shapes)]
    batch, config = TrainingBatch(1, [group]), made(advantage="dr_grpo")
    penalised = np.array([1.0 + 0.25, 1.0 - 0.25, 0.0])
    prepared = Objective(config, SingleRank()).prepare(batch)
    np.testing.assert_allclose(prepared.batch_advantages, penalised - penalised.mean(), rtol=1e-9)
    assert prepared.metrics["reward"] == pytest.approx(2 / 3), "the reward stays what it was"
    np.testing.assert_allclose(to_tensors(batch, config.algorithm).advantages, prepared.batch_advantages, rtol=1e-6)


@pytest.mark.parametrize("advantage", ["gae", "opob"])
def test_where_no_rewards_are_compared_it_is_refused(advantage):
    with pytest.raises(ConfigError, match=rf"'algorithm\.length_penalty' = 'kimi' .*'{advantage}'"):
        check(made(advantage=advantage), inputs=())
