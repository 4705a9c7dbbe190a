"""Every loss function against numbers worked out by hand."""

import math

import pytest
import torch

from april.learner.losses import clipped_policy_loss, group_advantages, kl_k3, probability_ratio, token_mean


def logs(*ratios):
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_advantages_are_rewards_less_the_mean_over_the_deviation():
    # mean 2, squared deviations 4 + 0 + 4 over n - 1 = 2: deviation 2
    assert group_advantages(torch.tensor([0.0, 2.0, 4.0])).tolist() == [-1, 0, 1]
    assert group_advantages(torch.tensor([1.0, 0.0])).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1] * 7, [3.0], []])
def test_a_group_without_spread_has_zero_advantages(rewards):
    assert group_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_clipped_loss_and_mask_by_hand():
    ratios = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5]
    advantages = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0])
    loss, clipped = clipped_policy_loss(logs(*ratios), torch.zeros(6), advantages, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-2.0, -2.2, -2.56, -1.0, 3.0, 1.6])
    assert clipped.tolist() == [False, False, True, False, False, True]


def test_the_gradient_is_ratio_times_advantage_and_zero_where_clipped():
    logprobs = logs(1.1, 1.5, 0.5).requires_grad_()
    loss, _ = clipped_policy_loss(logprobs, torch.zeros(3), torch.tensor([2.0, 2.0, -2.0]), 0.2, 0.28)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.2, 0.0, 0.0])


@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_a_far_off_behaviour_never_gives_an_infinite_loss_or_gradient(gap):
    logprobs = torch.tensor([gap, gap], requires_grad=True)
    loss, _ = clipped_policy_loss(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 0.28)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_the_ratio_and_k3_by_hand():
    behaviour = logs(0.2, 0.2)
    assert probability_ratio(logs(0.4, 0.2), behaviour).tolist() == pytest.approx([2.0, 1.0])
    assert kl_k3(logs(0.4, 0.2), behaviour).tolist() == pytest.approx([2 - 1 - math.log(2), 0.0], abs=1e-6)


def test_shares_of_the_token_mean_add_up_however_they_are_split():
    losses = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert token_mean(losses, 4) == 3.0
    assert token_mean(losses[:1], 4) + token_mean(losses[1:], 4) == 3.0
