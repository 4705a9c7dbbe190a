"""Estimators of a token's KL divergence from the log-probabilities of two policies; [K], [K] -> [K]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from april.learner.losses.columns import log_ratio

if TYPE_CHECKING:
    from torch import Tensor

K3_CAP = 10.0
"""Upper bound of one token's `k3`, which grows as q / p (p: probability under the policy; q: under the other one).
Without the bound a single token with p << q outweighs a batch."""


def k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """log p - log q (`logprobs` - `other_logprobs`): unbiased, of either sign. As a loss its expected gradient is
    zero."""
    return log_ratio(logprobs, other_logprobs)


def k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 (log p: `logprobs`; log q: `other_logprobs`): biased, but its expected gradient is that of
    the divergence."""
    return log_ratio(logprobs, other_logprobs).square() / 2


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """r - 1 - log r >= 0 with r = q / p (log p: `logprobs`; log q: `other_logprobs`), at most K3_CAP, where it has no
    gradient.

    The KL term of GRPO, arXiv 2402.03300, equation 4: low variance, and unbiased except for the cap, which applies for
    log r > 2.6 or log r < -11.
    """
    inverse = log_ratio(other_logprobs, logprobs)
    return (inverse.exp() - 1 - inverse).clamp(max=K3_CAP)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    function.__name__: function for function in (k1, k2, k3)
}
