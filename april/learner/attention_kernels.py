"""The kernels of packed attention, and its variants: windows, soft caps, sinks and biases.

each_sequence(q, k, v, seq_lens, scaling, Variant(window=128))     # on any device, with any variant
variable_length(...), flash_attention_4(...), by_flex(...)         # all sequences in one call, on accelerators
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORES_PER_BLOCK = 2**25
"""Most attention scores that exist at once if the matrix of scores is computed in memory, not by a fused kernel (128
MiB in fp32)."""
QUERIES = 512
"""Least number of queries in a block of sliding-window attention, however short the window: smaller blocks take longer
than computing the scores that they save."""
FLEX_BLOCK = 128
"""Tokens in a block of flex attention."""


class Exchange(ABC):
    """Exchange between the C ranks that share a row: each gives its 1 / C of the tokens, for all heads, and gets all
    tokens, for its 1 / C of the heads."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """C, the number of ranks that share a row."""

    @abstractmethod
    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Queries [1, H, T / C, D] of all H heads, and keys and values of theirs, for the tokens of this rank -> the
        same for all T tokens and the heads of this rank, 1 / C of them: queries [1, H / C, T, D]. Collective."""

    @abstractmethod
    def to_tokens(self, output: Tensor) -> Tensor:
        """Output [1, T, H / C, E] for all T tokens and the heads of this rank -> [1, T / C, H, E] for the tokens of
        this rank and all H heads: the inverse of `to_heads`. Collective."""

    @abstractmethod
    def of_heads(self, values: Tensor) -> Tensor:
        """The values of this rank's heads, 1 / C of `values` [H], which has one value for each head."""


class Packing:
    """Positions of the sequences in a packed row. It is neither a list nor a dataclass, since `torch.compile` looks
    into those and would compile anew for each number of sequences."""

    def __init__(self, seq_lens: list[int], cu_seq_lens: Tensor, exchange: Exchange | None = None):
        """`seq_lens`: length of each sequence; `cu_seq_lens`, int32 [sequences + 1]: their starts, then the length of
        the row; `exchange`: set if this rank has a part of the row's tokens."""
        self.exchange = exchange
        self.seq_lens, self.cu_seq_lens, self.longest = seq_lens, cu_seq_lens, max(seq_lens)
        self.made: dict[Any, Any] = {}
        """Results that the layers of one pass share: packings in chunks by the size of the chunk, masks of flex
        attention by window."""

    def alone(self) -> "Packing":
        """The packing of the same row without an exchange, for a rank that sees all of the row's tokens."""
        if "alone" not in self.made:
            self.made["alone"] = Packing(self.seq_lens, self.cu_seq_lens)
        return self.made["alone"]

    def in_chunks(self, size: int) -> "Packing":
        """The packing of the same row in which each chunk counts as a sequence: every sequence is cut, from its start
        on, into chunks of `size` tokens, the last of which may be shorter."""
        if size not in self.made:
            lens = [min(size, length - start) for length in self.seq_lens for start in range(0, length, size)]
            starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=self.cu_seq_lens.device)
            self.made[size] = Packing(lens, starts)
        return self.made[size]


@dataclass(frozen=True, eq=False)
class Variant:
    """Features of a layer's attention besides causality; plain causal attention has none."""

    window: int | None = None
    """Sliding window in tokens, as in `Reach`; None: a token sees all earlier ones."""
    softcap: float | None = None
    """c, if scores z become c tanh(z / c); None: they stay as they are."""
    sinks: Tensor | None = None
    """[H]: for each head one more score, of a key without value: it takes its part of the probability and adds nothing
    to the output. None: no such scores."""
    bias: Tensor | None = None
    """Bias added to the scores, [1, H, T, T] over the whole row; a dimension may be 1, for a bias that is the same
    along it. None: no bias."""

    @property
    def is_written_out(self) -> bool:
        """Whether the matrix of attention scores has to be computed in memory, since PyTorch's own attention has no
        soft cap, sinks or bias."""
        return self.softcap is not None or self.sinks is not None or self.bias is not None

    @property
    def is_plain(self) -> bool:
        return self.window is None and not self.is_written_out


PLAIN = Variant()


# --- a sequence at a time ---------------------------------------------------------------------------------------------


def each_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: list[int],
    scaling: float | None,
    variant: Variant = PLAIN,
) -> Tensor:
    """Packed attention by one call for each sequence, or for each block of its queries: query [1, H, T, D], key and
    value [1, heads, T, D or E] -> [1, T, H, E]. `scaling`: factor of the scores; None: 1 / sqrt(D)."""
    if query.device.type != "cpu" or variant.is_written_out:  # elsewhere only such kernels avoid the whole square
        key, value = all_heads(key, query.shape[1]), all_heads(value, query.shape[1])
    parts = zip(*(tensor.split(seq_lens, dim=2) for tensor in (query, key, value)), strict=True)
    outputs: list[Tensor] = []
    for start, (q, k, v) in zip(accumulate(seq_lens, initial=0), parts, strict=False):
        bias = None if variant.bias is None else bias_of(variant.bias, start, q.shape[2])
        if variant.is_written_out or (variant.window is not None and variant.window < q.shape[2]):
            outputs.extend(in_blocks(q, k, v, scaling, replace(variant, bias=bias)))
        else:
            shared_kv_heads = q.shape[1] != k.shape[1]
            outputs.append(
                F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared_kv_heads)
            )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def bias_of(bias: Tensor, start: int, length: int) -> Tensor:
    """The part of a bias [1, H, T, T] for the sequence of `length` tokens that begins at token `start` of the row. Of
    the last two dimensions, one of size 1 (the same bias for all tokens) keeps that size."""
    for dim in (-2, -1):
        if bias.shape[dim] != 1:
            bias = bias.narrow(dim, start, length)
    return bias


def in_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, variant: Variant) -> Iterator[Tensor]:
    """Attention of one sequence: query [1, H, n, D], key and value [1, heads, n, D or E] -> [1, H, queries, E] for each
    block of its queries, in order. A block has so few queries that at most `SCORES_PER_BLOCK` scores exist at once. If
    scores are computed in memory (`Variant.is_written_out`) and there are several blocks, the backward pass computes
    the scores again."""
    length, scale = query.shape[2], query.shape[-1] ** -0.5 if scaling is None else scaling
    window = min(length, variant.window or length)
    rows = max(window, QUERIES)
    rows = max(1, min(rows, SCORES_PER_BLOCK // (query.shape[1] * (window + min(rows, QUERIES)))))
    for start in range(0, length, rows):
        end, first = min(start + rows, length), max(0, start - window + 1)
        q, k, v = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        behind = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        sees = (behind >= 0) & (behind < window)
        if not variant.is_written_out:
            shared_kv_heads = q.shape[1] != k.shape[1]
            yield F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=shared_kv_heads)
            continue
        bias = variant.bias
        if bias is not None:
            bias = bias if bias.shape[-2] == 1 else bias[..., start:end, :]
            bias = bias if bias.shape[-1] == 1 else bias[..., first:end]
        inputs = (q, k, v, sees, scale, variant.softcap, variant.sinks, bias)
        yield written_out(*inputs) if rows >= length else checkpoint(written_out, *inputs, use_reentrant=False)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention with its scores in memory: query [1, H, n, D], key [1, H, m, D], value [1, H, m, E] -> [1, H, n, E].
    `sees` bool [n, m]: whether a query sees a key; `scale`: factor of the scores; `softcap`, `sinks`, `bias`: as in
    `Variant`. Scores and softmax are fp32 at least."""
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ key.to(exact).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    chances = torch.softmax(scores, -1)[..., : key.shape[2]]
    return chances.to(value.dtype) @ value


def all_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat the heads (dimension 1) of `tensor`, keys or values, so that each of the `heads` query heads has one of
    its own."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


# --- all sequences in one call ----------------------------------------------------------------------------------------


def flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, longest: int, scaling: float | None
) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func  # the package flash-attn-4, which compiles at the first call

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seq_lens, cu_seqlens_k=cu_seq_lens, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scaling, causal=True, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return output[None]


def variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Packed attention by PyTorch's flash attention: query [1, H, T, D], key and value [1, heads, T, D or E] -> [1, T,
    H, E]. Values narrower than keys (E < D) are padded. `longest`: tokens of the longest sequence; `scaling`: factor of
    the scores, None: 1 / sqrt(D); `window`, `sinks`: as in `Variant`."""
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    reach = (-1 if window is None else window - 1, 0)  # how many earlier tokens are seen (-1: all) and later ones
    forward, backward = flash_kernels(cu_seq_lens, longest, scaling, reach)
    output = forward(q, k, v) if sinks is None else WithSinks.apply(q, k, v, sinks, forward, backward)
    return output[None, ..., :width].contiguous()


def flash_kernels(
    cu_seq_lens: Tensor, longest: int, scaling: float | None, reach: tuple[int, int]
) -> tuple[Callable, Callable]:
    """PyTorch's flash attention of packed sequences: its (forward, backward) functions, as `WithSinks` calls them.
    `longest`: tokens of the longest sequence. `reach`: most (earlier, later) tokens that a token sees, -1 for all."""
    from torch.nn.attention import varlen  # imported here: builds may lack it

    def forward(q: Tensor, k: Tensor, v: Tensor, sums: bool = False) -> Any:
        options: dict[str, Any] = {"scale": scaling, "window_size": reach}
        if q.shape[1] != k.shape[1] and "enable_gqa" in parameters_of(varlen.varlen_attn):
            options["enable_gqa"] = True  # torch 2.11 takes them without a word
        if sums:
            options["return_aux"] = varlen.AuxRequest(lse=True)
        return varlen.varlen_attn(q, k, v, cu_seq_lens, cu_seq_lens, longest, longest, **options)

    def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, sums: Tensor) -> Any:
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        return torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, output, sums, cu_seq_lens, cu_seq_lens, longest, longest, 0.0, reach == (-1, 0),
            random_state, torch.empty(0, device=q.device), scale=scaling,
            window_size_left=reach[0], window_size_right=reach[1],
        )  # fmt: skip

    return forward, backward


class WithSinks(torch.autograd.Function):
    """Attention with one sink for each head, by a kernel that has no sinks itself.

    query [T, H, D], key and value [T, H_kv, D], sinks [H] -> [T, H, D]. The kernel's `forward(q, k, v, sums=True)`
    gives the output without sinks, and the logarithms of the softmax's sums of exponentials, [H, T]. Its
    `backward(gradient, q, k, v, output, sums)` gives the gradients. Passed an output and sums that include the sinks,
    that `backward` computes the gradients with sinks, since it recomputes probabilities from the sums. A kernel's own
    autograd would lose the gradient that flows through the sums.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, forward, backward):
        output, sums = forward(q, k, v, sums=True)
        with_sink = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        output = (output * (sums - with_sink).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, output, with_sink)
        ctx.backward_pass = backward
        return output

    @staticmethod
    def backward(ctx, gradient):
        """Each query gives its sink the probability exp(sink - sums), so the sink's gradient is the sum over queries of
        minus that probability times the inner product of gradient and output."""
        q, k, v, sinks, output, sums = ctx.saved_tensors
        gradients = ctx.backward_pass(gradient, q, k, v, output, sums)
        products = (gradient.to(sums.dtype) * output.to(sums.dtype)).sum(-1).T
        taken = (sinks.to(sums.dtype)[:, None] - sums).exp()
        return *gradients, -(taken * products).sum(1).to(sinks.dtype), None, None


def by_flex(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, variant: Variant
) -> Tensor:
    """Attention of layers with soft caps, by flex attention, which is compiled on the first call: query [1, H, T, D],
    key and value [1, heads, T, D or E] -> [1, T, H, E]. `scaling`: factor of the scores; None: 1 / sqrt(D)."""
    from torch.nn.attention.flex_attention import AuxRequest

    def capped(score, *place):
        return variant.softcap * torch.tanh(score / variant.softcap)

    kept = ("flex", variant.window)
    if kept not in packing.made:
        packing.made[kept] = flex_mask(packing, variant.window)
    output, aux = compiled_flex()(
        query, key, value, capped, packing.made[kept], scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if variant.sinks is not None:
        share = torch.sigmoid(aux.lse - variant.sinks.to(aux.lse.dtype)[:, None])
        output = (output * share[..., None]).to(query.dtype)
    return output.transpose(1, 2).contiguous()


@cache
def compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex_mask(packing: Packing, window: int | None) -> Any:
    """Flex attention's mask of packed causal sequences, with sliding windows of `window` tokens (None: no windows). No
    [T, T] mask of the row is allocated for it."""
    from torch.nn.attention.flex_attention import BlockMask

    starts = packing.cu_seq_lens
    length, device = sum(packing.seq_lens), starts.device
    window = length if window is None else window
    sequence = torch.repeat_interleave(torch.arange(len(starts) - 1, device=device), starts.diff(), output_size=length)

    def sees(batch, head, q, k):
        return (sequence[q] == sequence[k]) & (q >= k) & (q - k < window)

    firsts = torch.arange(0, length, FLEX_BLOCK, device=device)
    lasts = (firsts + FLEX_BLOCK - 1).clamp(max=length - 1)
    touch = (sequence[firsts][:, None] <= sequence[lasts]) & (firsts[:, None] - lasts < window)
    touch = touch.tril()
    order = touch.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        touch.sum(-1, dtype=torch.int32)[None, None], order[None, None], BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees,
        seq_lengths=(length, length),
    )  # fmt: skip


@cache
def parameters_of(function: Callable) -> frozenset[str]:
    return frozenset(signature(function).parameters)
