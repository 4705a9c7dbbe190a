"""Expected values of SGLang's tensor checksums, computed from the tensors that the server was sent.

SGLang hashes parameters in its own layout: query, key and value projections are fused, and so are gate and up. On a CPU
the checksum is the start of SHA-256 over the bytes, with intermediate size and vocabulary padded with zeros. On an
accelerator it uses another hash, which is not predicted here.
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
"""Module -> fused module; the parts are concatenated in this order."""
PADDED_ROWS = {"gate_proj": 32, "up_proj": 32, "embed_tokens": 64, "lm_head": 64}
"""Module -> number of which its rows are padded to a multiple."""
PADDED_COLUMNS = {"down_proj": 32}
"""Module -> number of which its columns are padded to a multiple."""
DIGITS = 16
"""Hexadecimal digits of a checksum."""
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Model types with these tensor names and fusions."""


def can_predict_checksums(server_info: Mapping[str, Any], model_type: str | None) -> bool:
    """Whether checksums can be predicted: by its /server_info the server holds the whole model in float32 on a CPU."""
    whole = server_info.get("tp_size", 1) == 1 and not server_info.get("quantization")
    exact = server_info.get("device") == "cpu" and server_info.get("dtype") in ("float32", "float")
    return whole and exact and model_type in MODEL_TYPES


def checksums_in_server(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Checksums by the server's tensor names, for one tensor-parallel rank. `dtype`: of the server's tensors."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".")
        outer, _, module = owner.rpartition(".")
        fused = ".".join(filter(None, [outer, FUSED.get(module, module), kind]))
        parts.setdefault(fused, {})[module] = padded(module, tensor)
    ordered = {name: sorted(own, key=lambda module: [*FUSED, module].index(module)) for name, own in parts.items()}
    return {name: digest([parts[name][module] for module in modules], dtype) for name, modules in ordered.items()}


def padded(module: str, tensor: Tensor) -> Tensor:
    """The tensor with intermediate size and vocabulary zero-padded as in the server."""
    rows = -tensor.shape[0] % PADDED_ROWS.get(module, 1) if tensor.dim() else 0
    columns = -tensor.shape[1] % PADDED_COLUMNS.get(module, 1) if tensor.dim() == 2 else 0
    return pad(tensor, (0, columns, 0, rows) if tensor.dim() == 2 else (0, rows)) if rows or columns else tensor


def digest(tensors: list[Tensor], dtype: torch.dtype) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()[:DIGITS]
