"""Packed attention: causal attention within each of several sequences concatenated in one row, without padding.

Registered with transformers as `packed`. It refuses inputs that it would silently compute wrongly: padded batches, a
key-value cache, sliding windows, soft caps, sinks and dropout.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

log = logging.getLogger(__name__)

NAME, COMPILED_NAME = "packed", "packed_in_compiled_layers"
FLASH_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability (major, minor) with flash attention."""
FLASH_TYPES = (torch.bfloat16, torch.float16)
FLASH_4_MAJORS, FLASH_4_HEADS = (9, 10), (64, 96, 128)
"""Major compute capabilities, and sizes of heads, for which the package flash-attn-4 is used if it is installed."""


class Packing:
    """Where the sequences of a packed row lie. No list and no dataclass, since `torch.compile` looks into those and
    would compile anew for each number of sequences."""

    def __init__(self, seq_lens: list[int], cu_seq_lens: Tensor):
        """`seq_lens`: length of each sequence; `cu_seq_lens`, int32 [sequences + 1]: their starts, then the length of
        the row."""
        self.seq_lens, self.cu_seq_lens, self.longest = seq_lens, cu_seq_lens, max(seq_lens)


class PackedAttentionError(ValueError):
    """An input that packed attention would compute wrongly; the message names it and the fix."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    seq_lens: list[int] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    packing: Packing | None = None,
    **features,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> ([1, T, H, D], None); the sum of `seq_lens` is T.

    Runs `flash_attention_4` or `variable_length`, which need `cu_seq_lens_q` (int32 [sequences + 1]) and
    `max_length_q`, or `each_sequence`, as `choose_kernel` decides. `packing` stands for all three. Raises
    PackedAttentionError for inputs that none supports.
    """
    if packing is not None:
        seq_lens, cu_seq_lens_q, max_length_q = packing.seq_lens, packing.cu_seq_lens, packing.longest
    lengths = check_supported(query, key, attention_mask, dropout, seq_lens, features)
    kernel = kernel_for(query.device, query.dtype, query.shape[-1])
    if kernel == "each_sequence":
        return each_sequence(query, key, value, lengths, scaling), None
    if cu_seq_lens_q is None or max_length_q is None:
        raise PackedAttentionError("cu_seq_lens_q and max_length_q are missing; pass both next to seq_lens")
    attend = flash_attention_4 if kernel == "flash_attention_4" else variable_length
    return attend(query, key, value, cu_seq_lens_q, max_length_q, scaling), None


def choose_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int, has_varlen: bool, has_flash_4: bool
) -> str:
    """`flash_attention_4` or `variable_length` (one call for all sequences) where supported, otherwise `each_sequence`
    (one SDPA call per sequence).

    `capability` is the accelerator's compute capability, None on a CPU; `has_varlen`: PyTorch has `varlen_attn`;
    `has_flash_4`: the package flash-attn-4 can be imported.
    """
    if dtype not in FLASH_TYPES or capability is None or capability < FLASH_CAPABILITY:
        return "each_sequence"
    if has_flash_4 and capability[0] in FLASH_4_MAJORS and head_size in FLASH_4_HEADS:
        return "flash_attention_4"
    return "variable_length" if has_varlen else "each_sequence"


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_varlen, has_flash_4 = find_spec("torch.nn.attention.varlen") is not None, False
    if capability is not None and "flash-attn-4" in packages_distributions().get("flash_attn", []):
        try:
            has_flash_4 = bool(find_spec("flash_attn.cute.interface"))
        except Exception as error:
            log.warning("flash-attn-4 is installed, but cannot be imported, and is not used: %s", error)
    name = choose_kernel(capability, dtype, head_size, has_varlen, has_flash_4)
    log.info("packed attention by %s on %s in %s", name, device, dtype)
    return name


def each_sequence(query: Tensor, key: Tensor, value: Tensor, seq_lens: list[int], scaling: float | None) -> Tensor:
    if query.device.type != "cpu":  # there the kernels that do not write out the whole square want equally many heads
        key, value = all_heads(key, query.shape[1]), all_heads(value, query.shape[1])
    parts = zip(*(tensor.split(seq_lens, dim=2) for tensor in (query, key, value)), strict=True)
    shared_kv_heads = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared_kv_heads)
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


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
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, longest: int, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imported here: builds may lack it

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options = {"scale": scaling, "window_size": (-1, 0)}  # every earlier token, no later one
    if q.shape[1] != k.shape[1] and "enable_gqa" in parameters_of(varlen_attn):  # torch 2.11 takes them without a word
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, cu_seq_lens, cu_seq_lens, longest, longest, **options)[None]


def all_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads (dimension 1) so that each of the `heads` query heads has one of its own."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


@cache
def parameters_of(function: Callable) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def check_supported(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    seq_lens: list[int] | None,
    features: dict,
) -> list[int]:
    """Sequence lengths of a supported input. Raises PackedAttentionError for any other."""
    if attention_mask is not None:
        raise PackedAttentionError("an attention mask was passed; packed input has no padding, pass None")
    if query.shape[0] != 1:
        raise PackedAttentionError(f"{query.shape[0]} rows were passed; lay all sequences end to end in one row")
    if not seq_lens:
        raise PackedAttentionError("seq_lens is missing; pass the length of every sequence in the row")
    if sum(seq_lens) != query.shape[2] or key.shape[2] != query.shape[2]:
        raise PackedAttentionError(
            f"seq_lens add up to {sum(seq_lens)} for {query.shape[2]} queries and {key.shape[2]} keys; all three "
            "must agree, without a key-value cache"
        )
    if dropout:
        raise PackedAttentionError(f"attention dropout is {dropout}; set it to 0 in the model's config.json")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if features.get(name) is not None:
            raise PackedAttentionError(f"the model uses {name}, which packed attention does not compute")
    return seq_lens


def no_mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **unused) -> None:
    """Mask builder that transformers calls for `packed`: returns None. Raises PackedAttentionError for padding or a
    cache."""
    if attention_mask is not None:
        raise PackedAttentionError("an attention mask was passed; packed input has no padding, pass None")
    if q_length != kv_length:
        raise PackedAttentionError("a key-value cache is in use; pass use_cache=False")


def register(compiled: bool = False) -> str:
    """Register packed attention with transformers; returns the name to pass as `attn_implementation`. With `compiled`
    the name is for layers that are compiled, which call it as it is."""
    name = COMPILED_NAME if compiled else NAME
    AttentionInterface.register(name, torch.compiler.disable(packed_attention) if compiled else packed_attention)
    AttentionMaskInterface.register(name, no_mask)
    return name
