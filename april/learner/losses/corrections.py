"""Off-policy corrections for stale tokens: the proximal policy around which the loss clips, and a weight per token.

A token was sampled by its behaviour policy mu, `age` policy steps ago; pi is the current policy. The loss takes the
ratio pi / proximal, and is multiplied by importance weights for the remaining ratio proximal / mu. Corrections carry no
gradient.

A correction named in `algorithm.corrections` is a function (tokens, section) -> weights [K], or (weights [K], capped
[K]) where it has a cap, of `StaleTokens` and the configuration's section [algorithm]. This module imports without
torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from april.config.training import AlgorithmSection
from april.learner.losses.columns import Spans, bounded, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from april.learner.losses.ranks import Ranks


Correction = Callable[["StaleTokens", AlgorithmSection], "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True, eq=False)
class StaleTokens:
    """Inputs of a correction for K tokens, without gradients: the tokens of a micro-batch, or this rank's tokens of the
    batch (K may then be 0)."""

    logprobs: Tensor
    """Log-probabilities log pi under the current policy, float32 [K]."""
    proximal_logprobs: Tensor
    """Log-probabilities under the proximal policy, around which the loss clips; float32 [K]."""
    behaviour_logprobs: Tensor
    """Log-probabilities log mu under the behaviour policy, as recorded at sampling; float32 [K]."""
    advantages: Tensor
    """Advantage of each token, float32 [K]."""
    ages: Tensor
    """int64 [K]: policy steps between the version that sampled a token and the current weights."""
    spans: Spans
    ranks: Ranks
    """Process group for reductions over the tokens of all ranks, in corrections over the whole batch."""

    @cached_property
    def proximal_log_ratio(self) -> Tensor:
        """Log-ratio log(proximal / mu) of each token, float32 [K]."""
        return log_ratio(self.proximal_logprobs, self.behaviour_logprobs)

    @cached_property
    def current_log_ratio(self) -> Tensor:
        """Log-ratio log(pi / mu) of each token, float32 [K]."""
        return log_ratio(self.logprobs, self.behaviour_logprobs)


def weighing(correction: Correction) -> Correction:
    """Mark a correction as an importance weight by the ratio proximal / mu; at most one such correction is allowed."""
    correction.weighs = True  # type: ignore[attr-defined]
    return correction


def over_the_batch(correction: Correction) -> Correction:
    """Mark a correction that needs all tokens of a batch: every rank calls it once, with its own tokens of the
    batch."""
    correction.over_the_batch = True  # type: ignore[attr-defined]
    return correction


def interpolated_proximal(logprobs: Tensor, behaviour_logprobs: Tensor, ages: Tensor) -> Tensor:
    """Log-probabilities of the policy one version before pi, on the log-linear path from mu to pi; [K] -> [K].

    log proximal = log mu + (age - 1) / age (log pi - log mu), which is log mu for ages 0 and 1. The ratio that the loss
    clips is then (pi / mu)^(1 / age), the change by one version. AReaL's log-linear approximation of the proximal
    policy of decoupled PPO (arXiv 2110.00641, arXiv 2505.24298), without another forward pass.
    """
    share = (ages - 1).clamp(min=0) / ages.clamp(min=1)
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)


@weighing
def truncated(tokens: StaleTokens, section: AlgorithmSection) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: (min(proximal / mu, truncation) of each token, whether the cap applied); [K],
    bool [K].

    Ionides 2008, "Truncated Importance Sampling"; for the mismatch of sampler and trainer: Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    return capped(tokens.proximal_log_ratio.exp(), section.truncation)


@weighing
def truncated_sequence(tokens: StaleTokens, section: AlgorithmSection) -> tuple[Tensor, Tensor]:
    """(min(product of the ratios proximal / mu of a sequence, sequence_truncation), the same for all its tokens;
    whether the cap applied); [K], bool [K].

    The importance weight of whole responses, unbiased except for the cap: it also corrects the distribution of
    prefixes, which token ratios leave out. Its variance grows with the length of the response.
    """
    return capped(bounded(tokens.spans.sum(tokens.proximal_log_ratio)).exp(), section.sequence_truncation)


def capped(weights: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    return weights.clamp(max=cap), weights > cap


@weighing
def icepop(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """The ratio proximal / mu of a token where it is within [icepop_low, icepop_high], otherwise 0; [K].

    IcePop, "Every Step Evolves", arXiv 2510.18855.
    """
    ratios = tokens.proximal_log_ratio.exp()
    return ratios.where((ratios >= section.icepop_low) & (ratios <= section.icepop_high), 0.0)


def geometric(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """1 for all tokens of a sequence whose geometric mean of pi / mu is within [geometric_low, geometric_high],
    otherwise 0; [K].

    Sequence-level rejection by the mean log-ratio, which does not grow with length. Liu et al. 2025, "When Speed Kills
    Stability".
    """
    means = tokens.spans.mean(tokens.current_log_ratio).exp()
    return ((means >= section.geometric_low) & (means <= section.geometric_high)).to(means.dtype)


def on_policy_only(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """1 for tokens that the current version sampled (age 0), otherwise 0: the older part of a partial rollout is
    masked; [K]."""
    return (tokens.ages <= 0).to(tokens.logprobs.dtype)


# --- VESPO ------------------------------------------------------------------------------------------------------------


@weighing
def vespo(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """phi(w) = exp(lambda) w^k exp(-lambda w), w the product of the response's ratios proximal / mu; [K], the same for
    all tokens of a response.

    phi is 1 at w = 1, highest at w = k / lambda, and falls to 0 for small and for large w. `k` and `lambda` depend on
    the sign of the advantage. "VESPO", arXiv 2602.10693, the kernel as in the authors' code and TRL's `loss_type =
    "vespo"`. With `algorithm.proximal = "recomputed"` and `algorithm.loss = "cispo"` the loss is the paper's too.
    """
    positive = (tokens.advantages >= 0).to(tokens.proximal_log_ratio.dtype)
    k = positive * section.vespo_k_positive + (1 - positive) * section.vespo_k_negative
    decay = positive * section.vespo_lambda_positive + (1 - positive) * section.vespo_lambda_negative
    log_w = bounded(tokens.spans.sum(tokens.proximal_log_ratio))
    return (decay + k * log_w - decay * log_w.exp()).exp()


# --- M2PO -------------------------------------------------------------------------------------------------------------


@over_the_batch
def m2po(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """Mask, [K]: 0 for the tokens of the batch with the largest (log pi - log mu)^2, as many as needed until the mean
    over the kept tokens is below `m2po_threshold`; 1 elsewhere.

    "Prosperity before Collapse", arXiv 2510.01161, second moment and mask as in AReaL's documentation and actor, over
    the tokens with a nonzero advantage. Tokens with equal log-ratios are kept or masked together. Collective.
    """
    moments, trained = tokens.current_log_ratio.double().square(), tokens.advantages != 0
    largest = largest_kept_moment(tokens.ranks.gathered(moments[trained]), section.m2po_threshold)
    return ((moments <= largest) | ~trained).to(tokens.current_log_ratio.dtype)


def largest_kept_moment(moments: Tensor, threshold: float) -> float:
    """The largest moment m for which the mean of all moments <= m is below the threshold; -1 if there is none."""
    values, counts = moments.unique(return_counts=True)
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    kept = values[means < threshold]
    return kept[-1].item() if len(kept) else -1.0


# --- DPPO -------------------------------------------------------------------------------------------------------------


def dppo_tv(tokens: StaleTokens, section: AlgorithmSection) -> Tensor:
    """Mask, [K]: 0 where the step would move a probability out of the trust region around mu, 1 elsewhere. That is
    pi - mu > dppo_rise for A > 0, and mu - pi > dppo_fall for A <= 0.

    The binary approximation of the total variation distance, "Rethinking the Trust Region in LLM Reinforcement
    Learning", arXiv 2602.04879, as in verl's `loss_mode = "dppo_tv"`. The paper's importance ratio, truncated at a
    large value, is the correction `truncated`.
    """
    change, positive = tokens.logprobs.exp() - tokens.behaviour_logprobs.exp(), tokens.advantages > 0
    kept = (positive & (change <= section.dppo_rise)) | (~positive & (change >= -section.dppo_fall))
    return kept.to(change.dtype)
