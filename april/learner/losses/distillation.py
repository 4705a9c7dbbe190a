"""Advantages of tokens from a teacher's log-probabilities: on-policy distillation.

The function that `algorithm.distillation` names is called as (teacher_logprobs, old_logprobs, spans, section) and
returns advantages, all columns [K] without gradients. The first two are log-probabilities of the sampled tokens under
the teacher, and under the policy around which the loss clips (`algorithm.proximal`); `section` is the configuration's
`[algorithm]`. The result, times `algorithm.distillation_coef`, is added to the advantage of the reward. This module
imports without torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.learner.losses.columns import Spans, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from april.config.training import AlgorithmSection
    from april.learner.losses.advantages import Groups


def reverse_kl(teacher_logprobs: Tensor, old_logprobs: Tensor, spans: Spans, section: AlgorithmSection) -> Tensor:
    """A_t = sum over s >= t of discount^(s - t) (log p_teacher(s) - log p_old(s)), over the response's sampled tokens.

    The policy gradient of -KL(policy || teacher), whose expectation over the policy's own tokens is exact: with
    discount 0 that of each token's distribution, with discount 1 that of the whole response. "On-Policy Distillation",
    arXiv 2306.13649, with the reverse KL, and thinkingmachines.ai/blog/on-policy-distillation. Log-ratios are bounded
    to ±20 nats.
    """
    return spans.discounted(log_ratio(teacher_logprobs, old_logprobs), section.distillation_discount)


def no_reward(rewards: Groups, lengths: Groups) -> Groups:
    """A = 0: the reward is recorded and teaches nothing, as in distillation alone."""
    return [group.new_zeros(len(group)) for group in rewards]


no_reward.ignores_rewards = True  # type: ignore[attr-defined]
no_reward.takes_single_samples = True  # type: ignore[attr-defined]
