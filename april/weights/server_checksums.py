"""What SGLang's checksum of each of its tensors must be, from the tensors that it was sent.

It hashes parameters as it holds them: query, key and value projections are one, so are gate and up. On a CPU the hash
is the start of SHA-256 over the bytes, and intermediate size and vocabulary are padded with zeros; on an accelerator
the hash is another, which is not foretold here.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""in the order in which they lie"""
PADDED_ROWS = {"gate_proj": 32, "up_proj": 32, "embed_tokens": 64, "lm_head": 64}
"""to a multiple of this"""
PADDED_COLUMNS = {"down_proj": 32}
DIGITS = 16
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""whose names and fusions these are"""


def can_be_foretold(server_info: Mapping[str, Any], model_type: str | None) -> bool:
    """Whether a server of this /server_info holds such a model whole, in float32, on a CPU."""
    whole = server_info.get("tp_size", 1) == 1 and not server_info.get("quantization")
    exact = server_info.get("device") == "cpu" and server_info.get("dtype") in ("float32", "float")
    return whole and exact and model_type in MODEL_TYPES


def checksums_in_server(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """By the server's names; `dtype`: what it holds them in. One tensor-parallel rank holds them whole."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".")
        outer, _, module = owner.rpartition(".")
        held = ".".join(filter(None, [outer, FUSED.get(module, module), kind]))
        parts.setdefault(held, {})[module] = padded(module, tensor)
    ordered = {name: sorted(own, key=lambda module: [*FUSED, module].index(module)) for name, own in parts.items()}
    return {name: digest([parts[name][module] for module in modules], dtype) for name, modules in ordered.items()}


def padded(module: str, tensor: Tensor) -> Tensor:
    """With intermediate size and vocabulary filled up with zeros."""
    rows = -tensor.shape[0] % PADDED_ROWS.get(module, 1) if tensor.dim() else 0
    columns = -tensor.shape[1] % PADDED_COLUMNS.get(module, 1) if tensor.dim() == 2 else 0
    return pad(tensor, (0, columns, 0, rows) if tensor.dim() == 2 else (0, rows)) if rows or columns else tensor


def digest(tensors: list[Tensor], dtype: torch.dtype) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()[:DIGITS]
