"""The loss as small pure functions over per-token log-probabilities and advantages."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""log-ratios are cut here, so that exp() stays finite and a masked branch never yields 0 * inf in backward"""


def group_advantages(rewards: Tensor) -> Tensor:
    """Group-relative advantages (r - mean(r)) / std(r) of the samples of one prompt; [n] -> [n].

    GRPO, "DeepSeekMath" arXiv 2402.03300, section 4.1.2, with the sample (n - 1) standard deviation, in float64.
    A group without spread (equal rewards, or a single sample) says nothing: zeros.
    """
    rewards = rewards.double()
    if rewards.numel() == 0 or rewards.min() == rewards.max():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std()


def probability_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """pi(token) / behaviour(token) for each token; [K], [K] -> [K]."""
    return (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) for each token, and where the clip took effect.

    PPO, arXiv 1707.06347, equation 7, with the two bounds apart as in DAPO, arXiv 2503.14476, equation 10. The
    ratio is taken against the behaviour policy that sampled the token, however old. All [K]; the second result
    is boolean: tokens whose gradient the clip has cut to zero.
    """
    ratio = probability_ratio(logprobs, behaviour_logprobs)
    surrogate = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(surrogate, bounded), bounded < surrogate


def token_mean(losses: Tensor, total_tokens: int) -> Tensor:
    """This micro-batch's share of the mean over all response tokens of the global batch; [K] -> scalar.

    DAPO's token-level loss, arXiv 2503.14476, equation 12. `total_tokens` counts the whole batch over all
    ranks, so shares (and their gradients) are added up, over micro-batches and over ranks, never averaged.
    """
    return losses.sum() / total_tokens


def kl_k3(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Estimate of KL(behaviour || pi) from each behaviour token: r - 1 - log r >= 0, r = pi / behaviour; [K] -> [K].

    The k3 estimator, John Schulman, "Approximating KL Divergence" (2020).
    """
    log_ratio = (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio
