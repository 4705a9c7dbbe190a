"""Advantages of sets of k responses equal their definition, by all sets."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from april.config import Config, ConfigError
from april.config.checks import check
from april.learner.losses import ADVANTAGES, find_checked
from april.learner.losses.pass_at_k import pass_at_k


def reference(rewards, k):
    """The mean of the normalised rewards of all sets of k responses that a response is in."""
    sets = list(combinations(range(len(rewards)), k))
    best = np.array([float(max(rewards[i] for i in chosen) > 0) for chosen in sets])
    if best.std() == 0:
        return [0.0] * len(rewards)
    normalised = (best - best.mean()) / best.std()
    return [
        np.mean([a for a, chosen in zip(normalised, sets, strict=True) if i in chosen]) for i in range(len(rewards))
    ]


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("right", range(9))
def test_the_analytic_form_is_the_mean_over_all_sets(k, right):
    rewards = np.random.default_rng(right).permutation([1.0] * right + [0.0, -1.0] * 4)[:8]
    [found] = pass_at_k([torch.from_numpy(rewards.copy())], [], pass_k=k)
    np.testing.assert_allclose(found, reference(rewards, k), rtol=1e-9, atol=1e-9)


def test_with_k_of_1_they_are_those_of_the_rewards_over_the_deviation():
    [found] = pass_at_k([torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)], [], pass_k=1)
    assert found.tolist() == pytest.approx([3**0.5, *[-1 / 3**0.5] * 3])


def made(k):
    tree = {"model": {"path": Path()}, "data": {"path": "rows.jsonl"}, "schedule": {"n_samples_per_prompt": 4}}
    return Config.model_validate(tree | {"algorithm": {"advantage": "pass_at_k", "pass_k": k}})


def test_k_is_a_key_and_no_more_than_the_responses_of_a_group():
    rewards = [torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)]
    found = find_checked(ADVANTAGES, "pass_at_k", made(2).algorithm)(rewards, [])
    assert found[0].tolist() == pass_at_k(rewards, [], pass_k=2)[0].tolist()
    with pytest.raises(ConfigError, match=r"'algorithm\.pass_k' = 5 .*n_samples_per_prompt = 4"):
        check(made(5), inputs=())
    [lost] = pass_at_k([rewards[0][:2]], [], pass_k=4)
    assert lost.tolist() == [0.0, 0.0], "a group that has lost samples is one set"
