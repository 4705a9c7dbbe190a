"""Corrections of stale tokens: the policy around which the loss clips, and a weight for each token.

A token was sampled by its behaviour policy mu, `age` versions ago; pi is the policy at hand. The loss takes its
ratio against a proximal policy and is multiplied by weights that make up for what lies between the proximal
policy and mu. No correction carries a gradient. Those with a cap also say which tokens it has touched.

One that is named in `algorithm.corrections` is a function (tokens, section) -> weights, or (weights, touched): of
`StaleTokens` and the configuration's [algorithm], to [K]. This module is read without torch: a configuration is checked
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from april.config.algorithm import AlgorithmSection
from april.learner.losses.columns import MAX_LOG_RATIO, Spans, log_ratio

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from april.learner.losses.ranks import Ranks

Correction = Callable[["StaleTokens", AlgorithmSection], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True, eq=False)
class StaleTokens:
    """What a correction sees of K tokens: those of a micro-batch, or of all that this rank has of a batch, which may
    be none. No gradient."""

    logprobs: Tensor
    """float32 [K]: of the policy at hand"""
    proximal_logprobs: Tensor
    """float32 [K]"""
    behaviour_logprobs: Tensor
    """float32 [K]"""
    advantages: Tensor
    """float32 [K]"""
    ages: Tensor
    """int64 [K]: steps between the version that sampled a token and the weights at hand"""
    spans: Spans
    ranks: Ranks
    """by whom the tokens of other ranks are reached, where all of a batch are seen"""

    @cached_property
    def from_behaviour(self) -> Tensor:
        """float32 [K]: log of proximal policy over behaviour policy."""
        return log_ratio(self.proximal_logprobs, self.behaviour_logprobs)

    @cached_property
    def whole(self) -> Tensor:
        """float32 [K]: log of the policy at hand over behaviour policy."""
        return log_ratio(self.logprobs, self.behaviour_logprobs)


def weighing(correction: Correction) -> Correction:
    """Marks one that applies the ratio of proximal to behaviour policy; only one of those makes sense at a time."""
    correction.weighs = True  # type: ignore[attr-defined]
    return correction


def over_the_batch(correction: Correction) -> Correction:
    """Marks one that looks at all tokens of a batch: it is called on every rank, with what that rank has of it."""
    correction.over_the_batch = True  # type: ignore[attr-defined]
    return correction


@weighing
def truncate(tokens: StaleTokens, section: AlgorithmSection) -> tuple[Tensor, Tensor]:
    return truncated(tokens.from_behaviour, section.truncation)


@weighing
def truncate_sequences(tokens: StaleTokens, section: AlgorithmSection) -> tuple[Tensor, Tensor]:
    return truncated_sequence(tokens.from_behaviour, tokens.spans, section.sequence_truncation)


@weighing
def keep_within_a_band(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    return icepop(tokens.from_behaviour, section.icepop_low, section.icepop_high)


def keep_sequences_within_a_band(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    return geometric(tokens.whole, tokens.spans, section.geometric_low, section.geometric_high)


def keep_the_newest(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    return on_policy_only(tokens.ages, tokens.whole.dtype)


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
    return ratios.where((ratios >= low) & (ratios <= high), 0.0)


def geometric(log_ratios: Tensor, spans: Spans, low: float, high: float) -> Tensor:
    """1 for all tokens of a sequence whose geometric mean ratio lies within [low, high], otherwise 0.

    Sequence-level rejection on the mean log-ratio, which does not grow with length; Liu et al. 2025, "When Speed
    Kills Stability".
    """
    means = spans.mean(log_ratios).exp()
    return ((means >= low) & (means <= high)).to(log_ratios.dtype)


def on_policy_only(ages: Tensor, dtype: dtype | None = None) -> Tensor:
    """1 for tokens of the newest version, otherwise 0: partial rollouts with their older part masked. [default
    float32]"""
    return (ages <= 0).to(dtype) if dtype else (ages <= 0).float()
