"""Advantages of the parts of a reward, each apart: GDPO's formula, and what the learner makes of a batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from april.config import Config
from april.learner.batch import TrainingBatch, decode, encode
from april.learner.losses.advantages import grpo
from april.learner.losses.gdpo import gdpo
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from tests.support.learner.small_learner import make_sample

SIZES = (8, 3, 5, 2)


def reference(groups, weights):
    """GDPO of groups [n, P], by its definition: arXiv 2601.05242, section 3."""
    summed = []
    for group in groups:
        total = np.zeros(len(group))
        for part, weight in zip(group.T, weights, strict=True):
            if part.max() > part.min():
                total += weight * (part - part.mean()) / part.std(ddof=1)
        summed.append(total)
    everything = np.concatenate(summed)
    return [(each - everything.mean()) / everything.std(ddof=1) for each in summed]


def random_groups(rng, scales):
    groups = [rng.normal(size=(size, len(scales))) * scales for size in SIZES]
    groups[1][:, 0] = 0.5  # a part without spread
    return groups


def test_it_is_its_definition_on_random_rewards_and_weights():
    rng = np.random.default_rng(0)
    for _ in range(20):
        groups, weights = random_groups(rng, [1.0, 100.0, 1e-3]), rng.normal(size=3)
        found = gdpo([torch.from_numpy(group) for group in groups], [], torch.from_numpy(weights))
        for one, expected in zip(found, reference(groups, weights), strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-9, atol=1e-9)


def test_the_scale_of_a_part_says_nothing_and_of_a_sum_everything():
    rng = np.random.default_rng(1)
    groups, weights = random_groups(rng, [1.0, 1.0]), torch.ones(2, dtype=torch.float64)
    small = [torch.from_numpy(group) for group in groups]
    large = [group * torch.tensor([1.0, 100.0]) for group in small]
    np.testing.assert_allclose(torch.cat(gdpo(small, [], weights)), torch.cat(gdpo(large, [], weights)), atol=1e-12)
    summed = [torch.cat(grpo([group.sum(1) for group in groups], [])) for groups in (small, large)]
    assert (summed[0] - summed[1]).abs().max() > 0.1


def test_without_spread_there_is_no_advantage():
    flat = torch.full((3, 2), 0.1, dtype=torch.float64)
    assert gdpo([flat], [], torch.ones(2, dtype=torch.float64))[0].tolist() == [0.0] * 3
    assert gdpo([], [], torch.ones(2, dtype=torch.float64)) == []


def section(**parts):
    tree = {"model": {"path": "."}, "data": {"path": "rows.jsonl"}, "algorithm": {"advantage": "gdpo"}}
    return Config.model_validate(tree | {"reward": {"part": parts}})


@pytest.fixture
def batch():
    """Two groups with parts, and one whose rows another verifier has scored."""
    rng = np.random.default_rng(2)
    values = [rng.normal(size=(size, 2)) * [1.0, 100.0] for size in (4, 3)]
    groups = [
        [replace(make_sample(rng, 2, 3, float(one.sum())), details=dict(zip(("b", "a"), one.tolist(), strict=True)))
         for one in group]
        for group in values
    ]  # fmt: skip
    plain = [make_sample(rng, 2, 3, reward) for reward in (1.0, 0.0)]
    return values, TrainingBatch(1, [*groups, plain])


def test_the_learner_takes_the_parts_by_their_names_and_a_group_without_them_by_its_reward(batch):
    values, received = batch
    objective = Objective(section(a={"weight": 0.5}, b={"weight": 2.0}), SingleRank())
    found = objective.prepare(decode(encode(received))).batch_advantages
    columns = [np.column_stack([group[:, 1], group[:, 0], np.zeros(len(group))]) for group in values]
    expected = reference([*columns, np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])], [0.5, 2.0, 1.0])
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-9)
