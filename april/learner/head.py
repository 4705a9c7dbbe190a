"""The head of a policy: log-probabilities and entropies from hidden states, computed in pieces so that the logits of
all tokens never exist at once."""

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from april.learner.packing import PackedSupport

LOGITS_PER_CHUNK = 2**24
"""Most logits that the head computes at once on a CPU (64 MiB in fp32); more tokens are scored in chunks."""
LOGITS_PER_ACCELERATOR_CHUNK = 2**27
"""Most logits that the head computes at once on an accelerator (512 MiB in fp32), whose matrix units want many rows;
counted in `april/launch/memory.py`."""
ROWS_OF_CHUNK = 128
"""The tokens of an accelerator's chunk are a multiple of this: whole tiles of its matrix products."""
GROUPED_BYTES = 16
"""Alignment of the rows of a matrix product's factors, bytes: products on accelerators are faster with it, and grouped
products require it."""


class ScoreTokens(torch.autograd.Function):
    """Autograd function of `score_tokens`. With more than one chunk, the backward pass recomputes the logits.

    With supports (truncated sampling), a logit's column is an index into the target's support instead of a token id;
    these log-probabilities take little memory and are kept for the backward pass. With `compiled`, `scores_of` and
    `gradient_of` run over the logits of a chunk, which are then never kept.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, rows_per_chunk, support, compiled, logit_dtype, cap):
        target_logits, logprobs, entropies = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        chunks = LogitChunks(hidden, weight, temperature, rows_per_chunk, logit_dtype, cap)
        columns = support.positions if support else targets
        whole = None if support or compiled else torch.empty_like(chunks.buffer)
        kept = []
        for rows, logits in chunks:
            if compiled:
                target_logits[rows], logprobs[rows], entropies[rows] = fused(scores_of)(logits, columns[rows, None])
                continue
            if support:
                logits = support.select(logits, rows)
            indices = columns[rows, None]
            target_logits[rows] = logits.gather(-1, indices)[:, 0]
            log_p = torch.log_softmax(logits, -1, out=None if whole is None else whole[: len(logits)])
            logprobs[rows] = log_p.gather(-1, indices)[:, 0]
            entropies[rows] = -row_products(torch.exp(log_p, out=logits), log_p)
            if support or len(hidden) <= rows_per_chunk:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, columns, target_logits - logprobs, entropies, *kept)
        ctx.temperature, ctx.rows_per_chunk, ctx.support = temperature, rows_per_chunk, support
        ctx.compiled, ctx.cap = compiled, cap
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing
        return logprobs, entropies

    @staticmethod
    def backward(ctx, logprob_gradients, entropy_gradients):
        """With p = softmax(z), z = logits / temperature: d logprob / dz = onehot - p, dH / dz = -p (log p + H).
        A soft cap c, z = c tanh(x / c) with x = logits / temperature, multiplies these by 1 - (z / c)^2."""
        hidden, weight, columns, normalisers, entropies, *kept = ctx.saved_tensors
        if logprob_gradients is None:
            logprob_gradients = torch.zeros_like(normalisers)
        if kept:
            starts = range(0, len(hidden), ctx.rows_per_chunk)
            log_ps = ((slice(start, start + len(log_p)), log_p) for start, log_p in zip(starts, kept, strict=True))
        else:
            chunks = LogitChunks(hidden, weight, ctx.temperature, ctx.rows_per_chunk, cap=ctx.cap)
            log_ps = (
                (rows, logits if ctx.compiled else logits.sub_(normalisers[rows, None])) for rows, logits in chunks
            )
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows, log_p in log_ps:
            logprob_gradient, factors = logprob_gradients[rows, None], None
            entropy_gradient = None if entropy_gradients is None else entropy_gradients[rows, None]
            if ctx.compiled:
                scales = [normalisers[rows, None], entropies[rows, None], logprob_gradient, entropy_gradient]
                options = (ctx.temperature, hidden.dtype, ctx.cap)
                gradient = fused(gradient_of)(log_p, columns[rows, None], *scales, *options)
            else:
                slope = None if ctx.cap is None else slope_of(log_p + normalisers[rows, None], ctx.cap)
                if entropy_gradient is None:  # the rows are scaled where they are short: hidden states, not logits
                    gradient, factors = log_p.exp_(), -logprob_gradient / ctx.temperature
                    gradient.scatter_add_(1, columns[rows, None], torch.full_like(logprob_gradient, -1.0))
                else:
                    factor = (log_p + entropies[rows, None]).mul_(-entropy_gradient).sub_(logprob_gradient)
                    gradient = log_p.exp_().mul_(factor).scatter_add_(1, columns[rows, None], logprob_gradient)
                    if ctx.temperature != 1:
                        gradient.div_(ctx.temperature)
                if slope is not None:
                    gradient.mul_(slope)
                if ctx.support:
                    gradient = ctx.support.spread(gradient, rows, len(weight))
                gradient = gradient.to(hidden.dtype)
            inputs, outputs = hidden[rows], hidden_gradient[rows]
            torch.mm(gradient, weight, out=outputs)
            if factors is not None:
                inputs = (inputs * factors).to(hidden.dtype)
                outputs.copy_(outputs * factors)
            if weight_gradient is not None:
                add_matmul(weight_gradient, gradient.T, inputs)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None, None, None, None


def slope_of(logits: Tensor, cap: float) -> Tensor:
    """Derivative by x of the soft cap c tanh(x / c), c = `cap`, computed from the values `logits` = c tanh(x / c); 0
    for the padding of supports."""
    return (logits / cap).clamp_(-1, 1).square_().neg_().add_(1)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each row of two matrices [n, V], [n], without their elementwise product in memory."""
    return torch.bmm(left[:, None], right[:, :, None])[:, 0, 0]


def scores_of(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logit, log-probability and entropy of each row of logits [n, V] at its column; `columns` int64 [n, 1], results
    [n]."""
    log_p = torch.log_softmax(logits, -1)
    found = logits.gather(-1, columns)[:, 0], log_p.gather(-1, columns)[:, 0]
    return *found, -(log_p.exp() * log_p).sum(-1)


def gradient_of(
    logits: Tensor,
    columns: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    logprob_gradients: Tensor,
    entropy_gradients: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
    cap: float | None,
) -> Tensor:
    """Gradient by a head's logits [n, V] as they are before the division by `temperature` and the soft cap `cap` (None:
    no cap); in `dtype`.

    `logits` are after both. Of each row, [n, 1] each: `columns`, the target's column; `normalisers`, the logarithm of
    the sum of exponentials; `entropies`; and the given gradients by the target's log-probability and by the entropy
    (None: 0).
    """
    log_p = logits - normalisers
    factor = -logprob_gradients
    if entropy_gradients is not None:
        factor = factor - entropy_gradients * (log_p + entropies)
    at_target = torch.arange(logits.shape[1], device=logits.device) == columns
    gradient = (log_p.exp() * factor + torch.where(at_target, logprob_gradients, 0.0)) / temperature
    return (gradient if cap is None else gradient * slope_of(logits, cap)).to(dtype)


@cache
def fused(function: Callable) -> Callable:
    """`function`, compiled on its first call for any number of rows, so that it reads its inputs in one pass or a
    few."""
    return torch.compile(function, dynamic=True)


class LogitChunks:
    """Iterates over (rows, fp32 logits / temperature, softly capped) of a head, in one buffer that each chunk
    overwrites.

    16-bit inputs are multiplied with fp32 accumulation and fp32 results: rounding a logit of 20 to bfloat16 would move
    it by 0.06.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        temperature: float,
        rows_per_chunk: int,
        logit_dtype: torch.dtype = torch.float32,
        cap: float | None = None,
    ):
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        self.logit_dtype, self.cap = logit_dtype, cap
        self.rows_per_chunk = min(rows_per_chunk, max(1, len(hidden)))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.buffer = torch.empty(self.rows_per_chunk, len(weight), dtype=dtype, device=hidden.device)
        if weight.device.type == "cpu":
            self.weight = weight.to(dtype)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, len(self.hidden), self.rows_per_chunk):
            part = self.hidden[start : start + self.rows_per_chunk]
            logits = self.buffer[: len(part)]
            if self.weight.dtype == logits.dtype:
                torch.mm(part.to(logits.dtype), self.weight.T, out=logits)
            else:
                torch.mm(part, self.weight.T, out_dtype=torch.float32, out=logits)
            if self.logit_dtype != torch.float32:
                logits.copy_(logits.to(self.logit_dtype))
            if self.temperature != 1:
                logits.div_(self.temperature)
            if self.cap is not None:
                logits.div_(self.cap).tanh_().mul_(self.cap)
            yield slice(start, start + len(part)), logits


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, accumulated in the dtype of `total`, fp32 or that of `left`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cpu":
        total.addmm_(left.float(), right.float())
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, out_dtype=torch.float32, out=total)


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    support: PackedSupport | None = None,
    compiled: bool = False,
    logit_dtype: torch.dtype = torch.float32,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) under softmax(z), z = hidden weight^T / temperature, or with a
    soft cap softmax(cap tanh(z / cap)), renormalised over the target's support if there are supports.

    hidden [K, D], weight [V, D], targets int64 [K] -> float32 [K], [K]; both are differentiable, with one backward pass
    per call. At most `LOGITS_PER_CHUNK` logits exist at a time (on an accelerator `LOGITS_PER_ACCELERATOR_CHUNK`), in
    two copies; if one chunk holds all, it is kept for the backward pass. `compiled`: passes over whole logits are
    compiled. `logit_dtype`: type to which logits are rounded; without gradients only.
    """
    if hidden.device.type == "cpu":
        rows_per_chunk = max(1, LOGITS_PER_CHUNK // len(weight))
    else:
        rows_per_chunk = ROWS_OF_CHUNK * max(1, LOGITS_PER_ACCELERATOR_CHUNK // len(weight) // ROWS_OF_CHUNK)
    return ScoreTokens.apply(
        hidden, weight, targets, temperature, rows_per_chunk, support, compiled and support is None, logit_dtype, cap
    )


def with_bias(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and a head without bias with the same products, [K, D'] and [V, D']: the bias is one more column,
    of a feature that is 1, and zeros fill the rows to whole `GROUPED_BYTES`."""
    columns = GROUPED_BYTES // weight.element_size()
    ones = hidden.new_zeros(len(hidden), columns)
    ones[:, 0] = 1
    return torch.cat([hidden, ones], 1), torch.cat([weight, F.pad(bias[:, None], (0, columns - 1))], 1)
