"""Corrections of stale tokens: the policy around which the loss clips, and a weight for each token.

A token was sampled by its behaviour policy mu, `age` versions ago; pi is the policy at hand. The loss takes its
ratio against a proximal policy and is multiplied by weights that make up for what lies between the proximal
policy and mu. No correction carries a gradient. Those with a cap also say which tokens it has touched.
"""

import torch
from torch import Tensor

from april.learner.losses.columns import MAX_LOG_RATIO, Spans


def interpolated_proximal(logprobs: Tensor, behaviour_logprobs: Tensor, ages: Tensor) -> Tensor:
    """log-probabilities of the policy one version before pi, on the log-linear path from mu to pi; [K] -> [K].

    log mu + (age - 1) / age (log pi - log mu): mu itself for a token of age 1 or 0. The ratio that the loss
    clips is then (pi / mu)^(1 / age), what one version has changed. AReaL's log-linear approximation of the
    proximal policy of decoupled PPO (arXiv 2110.00641, arXiv 2505.24298), without another forward pass.
    """
    share = (ages - 1).clamp(min=0) / ages.clamp(min=1)
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)


def truncated(log_ratios: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """min(ratio, cap) for each token, and where the cap was less: truncated importance sampling.

    Ionides 2008; for the gap between sampler and trainer: Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training".
    """
    return capped(log_ratios.exp(), cap)


def truncated_sequence(log_ratios: Tensor, spans: Spans, cap: float) -> tuple[Tensor, Tensor]:
    """min(product of a sequence's ratios, cap) for all its tokens, and where the cap was less.

    The weight under which whole responses of mu stand for responses of pi, unbiased but for the cap: it also makes
    up for the prefixes, which token ratios leave out. Its variance grows with length.
    """
    return capped(spans.sum(log_ratios).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), cap)


def capped(weights: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    return weights.clamp(max=cap), weights > cap


def icepop(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """The ratio where it lies within [low, high], otherwise 0. IcePop, "Every Step Evolves", arXiv 2510.18855."""
    ratios = log_ratios.exp()
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def geometric(log_ratios: Tensor, spans: Spans, low: float, high: float) -> Tensor:
    """1 for all tokens of a sequence whose geometric mean ratio lies within [low, high], otherwise 0.

    Sequence-level rejection on the mean log-ratio, which does not grow with length; Liu et al. 2025, "When Speed
    Kills Stability".
    """
    means = spans.mean(log_ratios).exp()
    return ((means >= low) & (means <= high)).to(log_ratios.dtype)


def on_policy_only(ages: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 for tokens of the newest version, otherwise 0: partial rollouts with their older part masked."""
    return (ages <= 0).to(dtype)
