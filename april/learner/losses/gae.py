"""Advantages by a critic's values, and what the critic minimises.

An advantage estimator that says `needs_values` is a function (rewards, values, spans, section) -> advantages, all [K]
and without a gradient: `rewards` of each token, mostly that of the response at its last one, `values` of the critic
before each, `section` the configuration's `[critic]`. This module is read without torch: a configuration is checked
everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from april.learner.losses.columns import Spans

if TYPE_CHECKING:
    from torch import Tensor

    from april.config.critic import CriticSection
    from april.learner.losses.ranks import Ranks

VARIANCE = 1e-8
"""added to that of the advantages where they are whitened, as TRL and verl do"""


def gae(rewards: Tensor, values: Tensor, spans: Spans, section: CriticSection) -> Tensor:
    """A_t = d_t + gamma lambda A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t, and nothing behind the last token.

    "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438, equations 11 to 16.
    Steps are the tokens that the policy has sampled: what an environment says in between is a part of the next state.
    Summed in float64.
    """
    rows, width = len(spans.lengths), int(spans.lengths.max())
    first = spans.lengths.long().cumsum(0) - spans.lengths.long()
    places = spans.index, spans.index.new_ones(len(values)).cumsum(0) - 1 - first[spans.index]
    padded = values.new_zeros(2, rows, width + 1).double()
    padded[0].index_put_(places, rewards.double())
    padded[1].index_put_(places, values.double())
    reward, value = padded
    advantages = value.new_zeros(rows, width + 1)
    for t in reversed(range(width)):
        surprise = reward[:, t] + section.gamma * value[:, t + 1] - value[:, t]
        advantages[:, t] = surprise + section.gamma * section.lam * advantages[:, t + 1]
    return advantages[places].to(values.dtype)


gae.needs_values = True  # type: ignore[attr-defined]


def whitened(advantages: Tensor, ranks: Ranks) -> Tensor:
    """Less their mean and over their deviation, of the tokens of all ranks; [K, perhaps 0] -> [K]. Collective."""
    exact = advantages.double()
    count, total = ranks.total(exact.new_tensor([len(exact), float(exact.sum())]))
    centred = exact - total / count.clamp(min=1)
    variance = ranks.total(centred.square().sum()) / (count - 1).clamp(min=1)
    return (centred * (variance + VARIANCE).rsqrt()).to(advantages.dtype)


def value_losses(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token, and where the clip leaves no
    gradient; [K] each. Without a `clip` (V - R)^2 / 2.

    The squared error of PPO, arXiv 1707.06347, equation 9, clipped as in its authors' code, "Implementation Matters in
    Deep Policy Gradients", arXiv 2005.12729, section 3.
    """
    plain = (values - returns).square()
    if not clip:
        return plain / 2, plain.new_zeros(len(plain), dtype=plain.dtype).bool()
    near = before + (values - before).clamp(-clip, clip)
    bounded = (near - returns).square()
    return plain.maximum(bounded) / 2, bounded > plain
