"""Checks that an engine holds the weights it was sent: by the canary, and by checksums of SGLang's tensors.

The canary is a short token sequence, the same in every run of a model. The learner publishes its log-probabilities with
every version; an engine with the same weights computes nearly the same ones, and an engine with wrong weights is
detected before it samples (`april/workers/engines/weight_intake.py`). Imports no torch at module level, since every
process checks the configuration, which imports the transports.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CANARY_TOKENS = 48
"""Length of the canary in tokens, unless the run's prompts and responses are shorter."""
SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
WORD_MASK = (1 << 64) - 1


class Canary(msgspec.Struct, array_like=True, frozen=True):
    """The canary: a fixed token sequence with the learner's log-probabilities under one version of the weights."""

    tokens: list[int]
    """T token ids of the canary."""
    logprobs: list[float]
    """T - 1 log-probabilities, of each canary token but the first, at temperature 1."""
    dtype: str
    """The less precise of the dtypes that the learner computes in and publishes: float32 or bfloat16."""

    @property
    def text(self) -> np.ndarray:
        """The canary's token ids as an array, int32 [T]."""
        return np.array(self.tokens, np.int32)


def canary_tokens(vocabulary: int, at_most: int = CANARY_TOKENS) -> np.ndarray:
    """The canary's token ids, int32 [T] with T = min(CANARY_TOKENS, `at_most`), from 0 to `vocabulary` - 1.

    Small ids are more likely, as in text: tokenisers give them to frequent tokens, whose embeddings training changes
    most. So the logarithm of the id is uniform, not the id.
    """
    shares = [splitmix(position * SPLITMIX_INCREMENT) / 2**64 for position in range(1, min(CANARY_TOKENS, at_most) + 1)]
    return np.array([int((vocabulary + 1) ** share) - 1 for share in shares], np.int32).clip(0, vocabulary - 1)


def splitmix(x: int) -> int:
    """Finaliser of the SplitMix64 generator: maps a 64-bit integer to a pseudo-random one."""
    x &= WORD_MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return x ^ (x >> 31)


# --- checksums of SGLang's tensors ------------------------------------------------------------------------------------


FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Module -> fused module of SGLang; the tensors of the parts are concatenated in this order."""
PADDED_ROWS = {"gate_proj": 32, "up_proj": 32, "embed_tokens": 64, "lm_head": 64}
"""Module -> number to a multiple of which SGLang pads the tensor's rows."""
PADDED_COLUMNS = {"down_proj": 32}
"""Module -> number to a multiple of which SGLang pads the tensor's columns."""
CHECKSUM_DIGITS = 16
"""Number of hexadecimal digits of a tensor's checksum."""
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Model types whose tensors have these names and are fused in this way in SGLang."""


def can_predict_checksums(server_info: Mapping[str, Any], model_type: str | None) -> bool:
    """Whether checksums can be predicted: according to /server_info, the server holds the whole model in float32 on a
    CPU."""
    whole = server_info.get("tp_size", 1) == 1 and not server_info.get("quantization")
    exact = server_info.get("device") == "cpu" and server_info.get("dtype") in ("float32", "float")
    return whole and exact and model_type in MODEL_TYPES


def checksums_in_server(tensors: "Mapping[str, Tensor]", dtype: "torch.dtype | None" = None) -> dict[str, str]:
    """Expected checksums of the server's tensors, by the server's tensor names, for one tensor-parallel rank.

    `dtype`: dtype of the server's tensors; None: float32.
    """
    import torch

    parts: dict[str, dict[str, Tensor]] = {}
    dtype = dtype or torch.float32
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".")
        outer, _, module = owner.rpartition(".")
        fused = ".".join(filter(None, [outer, FUSED.get(module, module), kind]))
        parts.setdefault(fused, {})[module] = padded_as_in_server(module, tensor)
    ordered = {name: sorted(own, key=lambda module: [*FUSED, module].index(module)) for name, own in parts.items()}
    return {
        name: server_checksum([parts[name][module] for module in modules], dtype) for name, modules in ordered.items()
    }


def padded_as_in_server(module: str, tensor: "Tensor") -> "Tensor":
    """Zero-pad a tensor's intermediate-size and vocabulary dimensions as the server does."""
    from torch.nn.functional import pad

    rows = -tensor.shape[0] % PADDED_ROWS.get(module, 1) if tensor.dim() else 0
    columns = -tensor.shape[1] % PADDED_COLUMNS.get(module, 1) if tensor.dim() == 2 else 0
    return pad(tensor, (0, columns, 0, rows) if tensor.dim() == 2 else (0, rows)) if rows or columns else tensor


def server_checksum(tensors: "list[Tensor]", dtype: "torch.dtype") -> str:
    """Checksum of tensors that are concatenated in the server's dtype."""
    import torch

    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()[:CHECKSUM_DIGITS]
