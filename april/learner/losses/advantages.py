"""Advantages from the rewards of a batch, group by group, in float64; and the weight of each token in the loss.

Every estimator is a function (rewards, lengths) -> advantages over lists with one float64 [n] tensor per group of n
responses; `lengths` are response tokens. A group (for the batch-wide estimators: a batch) whose rewards have no spread
(`april.data.groups`) gets zeros. An estimator that compares nothing, and so takes groups of one, has the attribute
`takes_single_samples`. `advantages` runs an estimator and sets rounding errors to 0. This module imports
without torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from april.data import groups

if TYPE_CHECKING:
    from torch import Tensor

    Groups = list[Tensor]


ROUNDING = 1e-9
"""Advantages with a smaller absolute value are set to 0: of the rewards 0.1, 0.2 and 0.3 the second equals the mean up
to float rounding."""


def has_spread(rewards: Tensor) -> bool:
    return groups.has_spread(rewards.tolist())


def centred(rewards: Tensor) -> Tensor:
    """r - mean(r) of one group, [n] -> [n]; exactly zero without spread."""
    return rewards - rewards.mean() if has_spread(rewards) else rewards.new_zeros(len(rewards))


def grpo(rewards: Groups, lengths: Groups) -> Groups:
    """A_i = (r_i - mean(r)) / std(r) within the group, with the sample (n - 1) standard deviation.

    "DeepSeekMath", arXiv 2402.03300, section 4.1.2.
    """
    return [centred(group) / group.std() if has_spread(group) else group.new_zeros(len(group)) for group in rewards]


def no_baseline(rewards: Groups, lengths: Groups) -> Groups:
    """A_i = r_i: the reward itself, without a baseline.

    REINFORCE (Williams 1992). With rewards of 0 and 1 and the loss `cross_entropy` it is fine-tuning on the samples
    that passed: RAFT, arXiv 2304.06767.
    """
    return rewards


no_baseline.takes_single_samples = True  # type: ignore[attr-defined]


def dr_grpo(rewards: Groups, lengths: Groups) -> Groups:
    """A_i = r_i - mean(r) within the group, without the division by std(r), which gives groups of little spread more
    weight.

    "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2.
    """
    return [centred(group) for group in rewards]


def rloo(rewards: Groups, lengths: Groups) -> Groups:
    """A_i = r_i - mean of the *other* n - 1 rewards of the group = n / (n - 1) (r_i - mean(r)).

    "Back to Basics", arXiv 2402.14740, equation 4.
    """
    return [centred(group) * len(group) / max(1, len(group) - 1) for group in rewards]


def reinforce_pp(rewards: Groups, lengths: Groups) -> Groups:
    """A = (r - mean) / std, mean and std over all response tokens of the batch.

    "REINFORCE++", arXiv 2501.03262, section 3.
    """
    return whitened(rewards, lengths)


def reinforce_pp_baseline(rewards: Groups, lengths: Groups) -> Groups:
    """a = r - mean(r) within the group, then A = (a - mean) / std over all response tokens of the batch.

    "REINFORCE++", arXiv 2501.03262, the variant with a group baseline. Subtracting the batch mean moves a group without
    spread slightly off zero when reward correlates with response length.
    """
    return whitened([centred(group) for group in rewards], lengths)


def whitened(values: Groups, lengths: Groups) -> Groups:
    """(v - mean) / std over the batch, each value weighted by its response's tokens; std with the n - 1 correction."""
    import torch

    if not values:
        return []
    joined, weights = torch.cat(values), torch.cat(lengths)
    seen = joined[weights > 0]
    if not has_spread(seen):
        return [group.new_zeros(len(group)) for group in values]
    tokens = weights.sum()
    mean = (joined * weights).sum() / tokens
    variance = ((joined - mean).square() * weights).sum() / (tokens - 1)
    return [(group - mean) / variance.sqrt() for group in values]


def advantages(estimator: Callable[[Groups, Groups], Groups], rewards: Groups, lengths: Groups) -> Groups:
    """Advantages by an estimator, with absolute values below `ROUNDING` set to exactly 0."""
    return [group.masked_fill(group.abs() < ROUNDING, 0.0) for group in estimator(rewards, lengths)]


# --- token weights ----------------------------------------------------------------------------------------------------


def token_weights(
    kind: str, lengths: np.ndarray, tokens: np.ndarray, sequences: np.ndarray, constant_tokens: int
) -> np.ndarray:
    """Weight in the loss of each token of S sequences, the same for all tokens of a sequence; float64 [S].

    `lengths` [S] are response tokens. `tokens` and `sequences` [S] are T, the tokens, and N, the sequences, of the
    minibatch that a sequence is in; samples without a gradient count too. By `kind`:

    - `token_mean`: 1 / T, DAPO, arXiv 2503.14476, equation 12;
    - `sequence_mean`: 1 / (N length), GRPO, arXiv 2402.03300, equation 3;
    - `constant`: 1 / (N constant_tokens), Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    if kind == "token_mean":
        return 1 / tokens
    if kind == "sequence_mean":
        return 1 / (sequences * lengths.astype(np.float64))
    return 1 / (sequences * constant_tokens)


# --- VCPO: optimal baseline and step scale ----------------------------------------------------------------------------


def opob(rewards: Groups, log_ratios: Groups, squares: Groups) -> Groups:
    """A_i = r_i - b within the group, b = sum_i(w_i^2 |g_i|^2 r_i) / sum_i(w_i^2 |g_i|^2).

    w_i = pi / mu of response i, g_i the gradient of its log pi; `log_ratios`: log w_i, `squares`: |g_i|^2, [n] for each
    group of n. The baseline that minimises the variance of the importance-weighted policy gradient: VCPO, "Stable
    Asynchrony", arXiv 2602.17616, and mit-han-lab/vcpo, recipe/fully_async_policy/staleness_utils.py. If all gradients
    are zero, b is the plain mean.
    """
    return [minus_baseline(*group) for group in zip(rewards, log_ratios, squares, strict=True)]


def minus_baseline(rewards: Tensor, log_ratios: Tensor, squares: Tensor) -> Tensor:
    weights = (2 * log_ratios).exp() * squares
    total = weights.sum()
    return centred(rewards) if total == 0 else rewards - (weights * rewards).sum() / total


opob.needs_norms = True  # type: ignore[attr-defined]


def root_ess(figures: Mapping[str, float]) -> float:
    """sqrt(ESS / n), 0 to 1: ESS is the effective sample size of the ratios pi / mu of the n trained responses.
    `figures`: figures of a batch by name, among them ESS / n as `sequence_ess`; without it the result is 1.

    VCPO, "Stable Asynchrony", arXiv 2602.17616: its scaling for AdamW, as in mit-han-lab/vcpo. A response's ratio is
    the product over its tokens, not truncated. VCPO's baseline is `opob`.
    """
    return figures.get("sequence_ess", 1.0) ** 0.5
