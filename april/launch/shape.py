"""How large a model is, from its config.json alone."""

import json
from dataclasses import dataclass
from pathlib import Path

WEIGHT_BYTES = 2
"""of a parameter in an engine and on its way there, bfloat16"""


@dataclass(frozen=True)
class Shape:
    """What a model's config.json says of a Qwen or Llama."""

    parameters: int
    kv_bytes: int
    """of a token in an engine's cache, bfloat16"""
    context: int
    layers: int
    hidden: int
    kept_bytes: int
    """of a token in a layer, which the backward pass needs: bfloat16, what norms compute with in float32"""
    head: int
    """parameters of the output projection"""


def read_shape(folder: Path) -> Shape | None:
    """None where there is no such file, or one of another kind of model."""
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
    return Shape(
        parameters, 2 * layers * kv_width * WEIGHT_BYTES, context, layers, hidden, kept, head=vocabulary * hidden
    )
