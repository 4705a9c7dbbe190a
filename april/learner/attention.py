"""Packed attention: causal attention within each of several sequences concatenated in one row, without padding.

Registered with transformers as `packed`. It computes what transformers' models pass to an attention function: sliding
windows, chunks, soft caps, sinks and biases. It refuses inputs that it would silently compute wrongly: padded batches,
a key-value cache, masks of a model's own and dropout.
"""

import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from april.learner.attention_kernels import (
    Packing,
    Variant,
    by_flex,
    each_sequence,
    flash_attention_4,
    variable_length,
)

log = logging.getLogger(__name__)

NAME, COMPILED_NAME = "packed", "packed_in_compiled_layers"
FLASH_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability (major, minor) with flash attention."""
FLASH_TYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_MULTIPLE, FLASH_HEAD_LIMIT = 8, 256
"""Sizes of heads that `varlen_attn` takes: multiples of the first, up to the second."""
FLASH_4_MAJORS, FLASH_4_HEADS = (9, 10), (64, 96, 128)
"""Major compute capabilities, and sizes of heads, for which the package flash-attn-4 is used if it is installed."""


@dataclass(frozen=True)
class Reach:
    """Range of earlier tokens that the tokens of a layer attend to. It takes the place of transformers' mask."""

    window: int | None = None
    """Number of last tokens of its sequence that a token sees, itself included; None for all."""
    chunk: int | None = None
    """Size in tokens of the chunks that a sequence is divided into from its start; a token sees only tokens of its own
    chunk. None: not divided."""

    def squares(self, length: int) -> int:
        """Work of causal attention over a sequence of `length` tokens: twice the number of pairs of a token and an
        earlier one that it sees, about. It is `length**2` if every token sees all earlier ones."""
        if self.chunk is not None:
            return length // self.chunk * self.chunk**2 + (length % self.chunk) ** 2
        return length**2 - max(0, length - (self.window or length)) ** 2


class PackedAttentionError(ValueError):
    """Packed attention would compute an input wrongly; the message names the input and the fix."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Reach | Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    seq_lens: list[int] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **features,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, E] -> ([1, T, H, E], None); the sum of `seq_lens` is
    T.

    `attention_mask` is what `reach_of_mask` returned. `sliding_window`, `softcap`, `s_aux` (sinks) and `position_bias`
    are as transformers passes them, and described in `Variant`. `packing` stands for `seq_lens`, `cu_seq_lens_q` (int32
    [sequences + 1]) and `max_length_q`; the latter two are for accelerators. Which kernel runs is up to
    `choose_kernel`. Where `packing` has an exchange (context parallelism), T are this rank's tokens of the row. Raises
    PackedAttentionError for inputs that no kernel supports.
    """
    if packing is not None and (exchange := packing.exchange):
        check_exchanged(query, position_bias, exchange.ranks)
        query, key, value = exchange.to_heads(query, key, value)
        whole, s_aux = packing.alone(), s_aux if s_aux is None else exchange.of_heads(s_aux)
        options = dict(packing=whole, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, **features)
        output, _ = packed_attention(module, query, key, value, attention_mask, scaling, dropout, **options)
        return exchange.to_tokens(output), None
    if packing is not None:
        seq_lens, cu_seq_lens_q = packing.seq_lens, packing.cu_seq_lens
    lengths = check_supported(query, key, attention_mask, dropout, seq_lens, features)
    reach = checked_reach(attention_mask, sliding_window)
    if packing is None:
        starts = torch.tensor([0, *accumulate(lengths)]) if cu_seq_lens_q is None else cu_seq_lens_q
        packing = Packing(lengths, starts.to(query.device, torch.int32))
    if reach.chunk is not None:
        packing = packing.in_chunks(reach.chunk)
    window = None if reach.window is None or reach.window >= packing.longest else reach.window
    variant = Variant(window, softcap, s_aux, position_bias)
    heads = max(query.shape[-1], value.shape[-1])
    kernel = kernel_for(query.device, query.dtype, heads, variant.is_plain, softcap is not None)
    if kernel == "each_sequence" or position_bias is not None:
        return each_sequence(query, key, value, packing.seq_lens, scaling, variant), None
    if kernel == "flex":
        return by_flex(query, key, value, packing, scaling, variant), None
    starts, longest = packing.cu_seq_lens, packing.longest
    if kernel == "flash_attention_4":
        return flash_attention_4(query, key, value, starts, longest, scaling), None
    return variable_length(query, key, value, starts, longest, scaling, window, s_aux), None


def choose_kernel(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_size: int,
    has_varlen: bool,
    has_flash_4: bool,
    is_plain: bool = True,
    is_capped: bool = False,
) -> str:
    """`flash_attention_4`, `variable_length` or `flex` (one call for all sequences) where supported, otherwise
    `each_sequence` (a call or some for each sequence).

    `capability` is the accelerator's compute capability, None on a CPU; `has_varlen`: PyTorch has `varlen_attn`;
    `has_flash_4`: the package flash-attn-4 can be imported; `is_plain`: without windows and sinks; `is_capped`: with a
    soft cap.
    """
    if dtype not in FLASH_TYPES or capability is None or capability < FLASH_CAPABILITY:
        return "each_sequence"
    if is_capped:
        return "flex"
    if is_plain and has_flash_4 and capability[0] in FLASH_4_MAJORS and head_size in FLASH_4_HEADS:
        return "flash_attention_4"
    fits = head_size <= FLASH_HEAD_LIMIT and head_size % FLASH_HEAD_MULTIPLE == 0
    return "variable_length" if has_varlen and fits else "each_sequence"


@cache
def kernel_for(
    device: torch.device, dtype: torch.dtype, head_size: int, is_plain: bool = True, is_capped: bool = False
) -> str:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_varlen, has_flash_4 = find_spec("torch.nn.attention.varlen") is not None, False
    if capability is not None and "flash-attn-4" in packages_distributions().get("flash_attn", []):
        try:
            has_flash_4 = bool(find_spec("flash_attn.cute.interface"))
        except Exception as error:
            log.warning("flash-attn-4 is installed, but cannot be imported, and is not used: %s", error)
    name = choose_kernel(capability, dtype, head_size, has_varlen, has_flash_4, is_plain, is_capped)
    log.info("packed attention by %s on %s in %s", name, device, dtype)
    return name


# --- what is refused --------------------------------------------------------------------------------------------------


def check_supported(
    query: Tensor,
    key: Tensor,
    attention_mask: Reach | Tensor | None,
    dropout: float,
    seq_lens: list[int] | None,
    features: dict,
) -> list[int]:
    """The lengths `seq_lens` of the sequences of a supported input. Raises PackedAttentionError for any other. The
    parameters are those of `packed_attention`; `features`: its further keyword arguments."""
    if not isinstance(attention_mask, Reach | None):
        raise PackedAttentionError(
            "an attention mask was passed; packed input has no padding, and masks of a model's own are not computed"
        )
    if query.shape[0] != 1:
        raise PackedAttentionError(f"{query.shape[0]} rows were passed; lay all sequences end to end in one row")
    if not seq_lens:
        raise PackedAttentionError(
            "seq_lens is missing; pass the length of every sequence in the row, to a model whose layers pass it on"
        )
    if sum(seq_lens) != query.shape[2] or key.shape[2] != query.shape[2]:
        raise PackedAttentionError(
            f"seq_lens add up to {sum(seq_lens)} for {query.shape[2]} queries and {key.shape[2]} keys; all three "
            "must agree, without a key-value cache"
        )
    if dropout:
        raise PackedAttentionError(f"attention dropout is {dropout}; set it to 0 in the model's config.json")
    if features.get("is_causal") is False:
        raise PackedAttentionError("the layer's tokens see later ones, which packed attention does not compute")
    return seq_lens


def check_exchanged(query: Tensor, position_bias: Tensor | None, ranks: int) -> None:
    """Raises PackedAttentionError if context parallelism cannot exchange a layer's heads for tokens: if the layer has a
    `position_bias`, or if its number of query heads is no multiple of `ranks`, the number of ranks that share a row."""
    if position_bias is not None:
        raise PackedAttentionError("the layer's bias is of the places in a row, of which a rank sees only its own")
    if query.shape[1] % ranks:
        raise PackedAttentionError(f"the layer has {query.shape[1]} heads of queries, which {ranks} ranks cannot share")


def checked_reach(mask: Reach | None, sliding_window: int | None) -> Reach:
    """Reach of a layer's attention by its mask or, without a mask, by its `sliding_window`. Raises PackedAttentionError
    if they contradict each other."""
    if mask is None:
        return Reach(window=sliding_window)
    if sliding_window is not None and mask.chunk is None and mask.window != sliding_window:
        raise PackedAttentionError(f"the layer's sliding_window is {sliding_window}, and its mask's is {mask.window}")
    return mask


def reach_of_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **unused,
) -> Reach | None:
    """Mask builder that transformers calls for `packed`: returns the `Reach` that the layers with this mask get as
    `attention_mask`, None if each token sees all earlier ones. `local_size`: size of windows or of chunks. Raises
    PackedAttentionError for padding, a cache, or a mask that looks ahead or is a model's own."""
    if attention_mask is not None:
        raise PackedAttentionError("an attention mask was passed; packed input has no padding, pass None")
    if q_length != kv_length:
        raise PackedAttentionError("a key-value cache is in use; pass use_cache=False")
    if allow_is_bidirectional_skip is not None or use_vmap:
        raise PackedAttentionError("the model has a mask of its own, which packed attention does not compute")
    if local_size is None:
        return None
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if local_size == window == chunk:
        raise PackedAttentionError(
            f"the model's windows and chunks are both {window} tokens; which is meant is unknown"
        )
    return Reach(chunk=chunk) if local_size == chunk else Reach(window=local_size)


def register(compiled: bool = False) -> str:
    """Register packed attention with transformers; returns the name to pass as `attn_implementation`. `compiled`: the
    name is for layers under torch.compile, which call packed attention without compiling it."""
    name = COMPILED_NAME if compiled else NAME
    AttentionInterface.register(name, torch.compiler.disable(packed_attention) if compiled else packed_attention)
    AttentionMaskInterface.register(name, reach_of_mask)
    return name
