"""Divergences of the policy's distribution from a teacher's: distillation as a loss.

A divergence is a function (teacher_logprobs, logprobs) -> divergence of each row, [n, V], [n, V] -> [n]; the rows are
log-probabilities of all V ids. It is differentiated by `logprobs`, so its gradient is the true one: over all ids, not
only that of the sampled token. One with the attribute `over_top_k` may also be called with [n, k] of teacher and
policy: the log-probabilities of the k ids that the teacher finds most likely, not normalised over these. This module
imports without torch, so that any machine can check a configuration.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def forward_kl(teacher_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(teacher || policy) of each row, [n, V], [n, V] -> [n]: the sum over all ids of p_teacher (log p_teacher - log
    p). The policy covers all that the teacher may say.

    Knowledge distillation, arXiv 1503.02531, on the policy's own samples. With [n, k] log-probabilities of the
    teacher's top k ids, the result is the part of the sum over these ids, which may be negative. It is at least s log
    s, with s the sum of p_teacher over these ids, and least where p is p_teacher / s on them and 0 elsewhere.
    """
    return (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(-1)


forward_kl.over_top_k = True  # type: ignore[attr-defined]


def reverse_kl(teacher_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(policy || teacher) of each row, [n, V], [n, V] -> [n]: the sum over all ids of p (log p - log p_teacher). The
    policy leaves out what the teacher would not say.

    MiniLLM, arXiv 2306.08543, for each token's distribution.
    """
    return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(-1)


def jensen_shannon(teacher_logprobs: Tensor, logprobs: Tensor, *, divergence_mix: float) -> Tensor:
    """Generalised Jensen-Shannon divergence b KL(teacher || m) + (1 - b) KL(policy || m) from the mixture
    m = b p_teacher + (1 - b) p, b = `divergence_mix`: GKD, arXiv 2306.13649, section 2.

    It is at most log 2 for b = 1/2. Divided by b it nears the forward KL for b to 0, by 1 - b the reverse KL for b to
    1.
    """
    theirs, ours = math.log(divergence_mix), math.log1p(-divergence_mix)
    mixed = (teacher_logprobs + theirs).logaddexp(logprobs + ours)
    return divergence_mix * forward_kl(teacher_logprobs, mixed) + (1 - divergence_mix) * forward_kl(logprobs, mixed)
