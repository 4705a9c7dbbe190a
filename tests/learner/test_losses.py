"""Advantages, losses and corrections by hand and at their edges; `test_other_implementations.py` has the rest."""

import math

import numpy as np
import pytest
import torch

from april.config.training import AlgorithmSection
from april.learner.losses import ADVANTAGES, LOSSES, corrections
from april.learner.losses.advantages import advantages, grpo, token_weights
from april.learner.losses.kl import k3
from april.learner.losses.policy import Clip, gspo, gspo_token, ppo
from tests.support.learner.loss_inputs import logs, spans, stale_tokens
from tests.support.learner.small_learner import BY_GROUPS

ROOT_HALF = 0.5**0.5
CLIP = Clip(0.2, 0.28)


def groups(*values):
    return [torch.tensor(group, dtype=torch.float64) for group in values]


def flat(advantages):
    return [value for group in advantages for value in group.tolist()]


def one_each(rewards):
    return [torch.ones_like(group) for group in rewards]


# --- advantages ---------------------------------------------------------------------------------------------


def test_grpo_is_rewards_less_the_mean_over_the_deviation():
    # mean 2, squared deviations 4 + 0 + 4 over n - 1 = 2: deviation 2
    rewards = groups([0.0, 2.0, 4.0], [1.0, 0.0])
    assert flat(grpo(rewards, one_each(rewards))) == pytest.approx([-1, 0, 1, ROOT_HALF, -ROOT_HALF])


@pytest.mark.parametrize("name", BY_GROUPS)
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1] * 7, [3.0], []])
def test_without_spread_all_advantages_are_zero(name, rewards):
    assert flat(ADVANTAGES.find(name)(groups(rewards), groups([2.0] * len(rewards)))) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", BY_GROUPS)
def test_rewards_that_differ_by_rounding_are_the_same(name):
    assert flat(ADVANTAGES.find(name)(groups([0.1 + 0.2, 0.3, 0.3]), groups([2.0, 1.0, 1.0]))) == [0.0] * 3


@pytest.mark.parametrize("name", BY_GROUPS)
def test_an_advantage_that_is_rounding_is_zero(name):
    low, middle, high = flat(advantages(ADVANTAGES.find(name), groups([0.1, 0.2, 0.3]), groups([1.0, 1.0, 1.0])))
    assert low < middle == 0.0 < high


def test_an_empty_batch_has_no_advantages():
    assert all(estimator([], []) == [] for estimator in map(ADVANTAGES.find, BY_GROUPS))


# --- policy losses ------------------------------------------------------------------------------------------


def test_ppo_and_its_mask_by_hand():
    ratios = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5]
    advantages = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0])
    loss, clipped = ppo(logs(*ratios), torch.zeros(6), advantages, spans(6), CLIP)
    assert loss.tolist() == pytest.approx([-2.0, -2.2, -2.56, -1.0, 3.0, 1.6])
    assert clipped.tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize("name", LOSSES.shipped)
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_a_far_off_behaviour_never_gives_an_infinite_loss_or_gradient(name, gap):
    logprobs = torch.tensor([gap, gap], requires_grad=True)
    loss, _ = LOSSES.find(name)(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), spans(2), CLIP)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


# --- corrections --------------------------------------------------------------------------------------------


def test_the_proximal_policy_carries_no_gradient():
    logprobs = logs(0.5, 0.25, 0.1).requires_grad_()
    ages = torch.tensor([1, 2, 5])
    assert not corrections.interpolated_proximal(logprobs, logs(0.4, 0.5, 0.2), ages).requires_grad


def test_truncated_importance_weights():
    weights, truncated = corrections.truncated(stale_tokens([0.5, 1.5, 9.0]), AlgorithmSection(truncation=2.0))
    assert weights.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert truncated.tolist() == [False, False, True]


def test_a_ratio_that_equals_the_cap_is_not_truncated():
    assert not corrections.truncated(stale_tokens([1.0] * 3), AlgorithmSection(truncation=1.0))[1].any()


def test_only_tokens_of_the_newest_version_are_left():
    seen = stale_tokens([1.0] * 4, ages=[0, 1, 0, 7])
    assert corrections.on_policy_only(seen, AlgorithmSection()).tolist() == [1, 0, 1, 0]


def test_the_interpolated_proximal_policy_is_one_version_back_towards_behaviour():
    now, behaviour = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -3.0)
    found = corrections.interpolated_proximal(now, behaviour, torch.tensor([0, 1, 2, 4]))
    assert found.tolist() == [-3.0, -3.0, -2.0, -1.5]


# --- divergences, ratios and weights ------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [-30.0, -15.0, -3.0, 12.0])
def test_k3_of_one_token_never_outweighs_a_batch(gap):
    logprobs = torch.tensor([gap, -0.5], requires_grad=True)
    found = k3(logprobs, torch.zeros(2))
    found.sum().backward()
    assert found[0] == 10.0 and logprobs.grad[0] == 0.0
    assert found[1].item() == pytest.approx(math.exp(0.5) - 1 - 0.5) and logprobs.grad[1] != 0.0


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_bounds_the_ratio_of_the_sequence_and_not_of_each_token(loss):
    ratio = math.exp(-30 / 100)
    logprobs, advantages = torch.tensor([-30.0, *[0.0] * 99]), torch.ones(100)
    losses, _ = loss(logprobs, torch.zeros(100), advantages, spans(100), Clip(0.9, 0.9))
    assert losses.tolist() == pytest.approx([-ratio] * 100)


@pytest.mark.parametrize(
    "kind, weights",
    [("token_mean", [1 / 20, 1 / 20]), ("sequence_mean", [1 / 8, 1 / 24]), ("constant", [1 / 400, 1 / 400])],
)
def test_token_weights_refer_to_the_whole_batch(kind, weights):
    found = token_weights(kind, np.array([2, 6]), np.array([20, 20]), np.array([4, 4]), constant_tokens=100)
    assert found.tolist() == pytest.approx(weights)
