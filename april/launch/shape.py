"""Size of a model, computed from its config.json alone."""

import json
from dataclasses import dataclass
from pathlib import Path

WEIGHT_BYTES = 2
"""Bytes per parameter in an engine and in a weight transfer: bfloat16."""


@dataclass(frozen=True)
class ModelShape:
    """Size of a Qwen or Llama model."""

    parameters: int
    kv_bytes: int
    """KV cache bytes per token in an engine: bfloat16."""
    context: int
    layers: int
    hidden: int
    kept_bytes: int
    """Activation bytes per token and layer kept for the backward pass: bfloat16, but float32 inside norms."""
    head: int
    """Parameters of the output projection."""


def read_shape(folder: Path) -> ModelShape | None:
    """Size of the model in a folder; None without a config.json of a known architecture."""
    try:
        config = json.loads((folder / "config.json").read_text())
        hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocabulary, inner, context = (
            config[key] for key in ("vocab_size", "intermediate_size", "max_position_embeddings")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    head = config.get("head_dim") or hidden // heads
    kv_width, query_width = config.get("num_key_value_heads", heads) * head, heads * head
    attention = 2 * hidden * query_width + 2 * hidden * kv_width
    if config.get("model_type") == "qwen2":
        attention += query_width + 2 * kv_width
    if config.get("model_type") == "qwen3":
        attention += 2 * head
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = embeddings + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    kept = 20 * hidden + 14 * (query_width + kv_width) + 2 * kv_width + 8 * inner
    return ModelShape(
        parameters, 2 * layers * kv_width * WEIGHT_BYTES, context, layers, hidden, kept, head=vocabulary * hidden
    )
