"""Estimates of a KL divergence from single tokens: k1, k2, k3 of John Schulman, "Approximating KL Divergence" (2020).

Each is a function (logprobs, others) -> [K] for KL(sampler || other), where tokens come from the sampler.
"""

from collections.abc import Callable

from torch import Tensor

from april.learner.losses.columns import log_ratio

K3_CAP = 10.0
"""of one token's k3, which grows as exp() where p is far below other: one such token would outweigh a batch"""


def k1(logprobs: Tensor, others: Tensor) -> Tensor:
    """log p - log other: unbiased, of either sign. As a loss its expected gradient is zero."""
    return log_ratio(logprobs, others)


def k2(logprobs: Tensor, others: Tensor) -> Tensor:
    """(log p - log other)^2 / 2: biased, and its expected gradient is that of the divergence."""
    return log_ratio(logprobs, others).square() / 2


def k3(logprobs: Tensor, others: Tensor) -> Tensor:
    """r - 1 - log r >= 0 with r = other / p, at most K3_CAP, where it has no gradient. GRPO's, arXiv 2402.03300,
    equation 4: unbiased up to the cap, which log r > 2.6 or log r < -11 reach, and of little variance."""
    inverse = log_ratio(others, logprobs)
    return (inverse.exp() - 1 - inverse).clamp(max=K3_CAP)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    function.__name__: function for function in (k1, k2, k3)
}
