"""Generalised advantage estimation from a critic's values.

An advantage estimator with the attribute `needs_values` is a function (rewards, values, spans, section) -> advantages,
all columns [K] without gradients: `rewards` per token (usually the response's reward at its last token), `values` the
critic's estimate of the state before each token, `section` the configuration's `[critic]`. This module imports without
torch, so that any machine can check a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.learner.losses.columns import Spans

if TYPE_CHECKING:
    from torch import Tensor

    from april.config.training import CriticSection


def gae(rewards: Tensor, values: Tensor, spans: Spans, section: CriticSection) -> Tensor:
    """A_t = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t, with V = A = 0 after the last token.

    "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438, equations 11 to 16.
    The steps t are the tokens that the policy sampled: an environment's observation in between is part of the next
    state. Computed in float64.
    """
    rows, width = len(spans.lengths), int(spans.lengths.max())
    first = spans.lengths.long().cumsum(0) - spans.lengths.long()
    positions = spans.index, spans.index.new_ones(len(values)).cumsum(0) - 1 - first[spans.index]
    padded = values.new_zeros(2, rows, width + 1).double()
    padded[0].index_put_(positions, rewards.double())
    padded[1].index_put_(positions, values.double())
    reward, value = padded
    advantages = value.new_zeros(rows, width + 1)
    for t in reversed(range(width)):
        td_error = reward[:, t] + section.gamma * value[:, t + 1] - value[:, t]
        advantages[:, t] = td_error + section.gamma * section.lam * advantages[:, t + 1]
    return advantages[positions].to(values.dtype)


gae.needs_values = True  # type: ignore[attr-defined]
