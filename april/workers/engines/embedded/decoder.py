"""Llama-shaped decoders as plain functions over fused weights.

The structure is read from a Hugging Face folder's config.json, the weights from tensors with Hugging Face names. The
caller keeps keys and values, see `kv_cache.py`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from april.util.text import first_line
from april.workers.engines.base import EngineError
from april.workers.engines.entry import check_tensors

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported RoPE types: those whose frequencies do not depend on the sequence length."""
ATTENTION_BLOCK = 128
"""Number of queries in a block, for a prefill that follows a cached prefix: the attention of a row's queries is
computed block by block."""
SCORED_TOKENS = 1024
"""Number of tokens whose logits `score` computes at a time."""


@dataclass(frozen=True)
class DecoderShape:
    """Structure of a model, without its weights."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    norm_eps: float
    tied: bool
    """Whether the output projection is the embedding."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    inv_freq: Tensor
    """float32 [head_dim / 2]: rotary frequencies (radians per position)."""
    rotary_scale: float

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by its Hugging Face name."""
        shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden), "model.norm.weight": (self.hidden,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, queries, self.out_bias),
            "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
        }
        norms = {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            for name, size in norms.items():
                shapes[f"{prefix}{name}.weight"] = (size,)
        return shapes


def read_shape(folder: str | Path, dtype: torch.dtype | None = None) -> DecoderShape:
    """Read the structure from config.json. Raises EngineError if this engine cannot run it.

    `dtype`: data type of the computation, by default that of config.json.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise EngineError(f"{path} does not exist; give the folder of a Hugging Face model")
    model_type = json.loads(path.read_text()).get("model_type")
    if model_type not in MODEL_TYPES:
        raise EngineError(
            f"model_type {model_type!r} in {path} is not one that the torch engine runs; "
            f"use one of {', '.join(MODEL_TYPES)}, or another engine"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what transformers raises of a config.json has no bounds
        raise EngineError(f"{path} cannot be read: {first_line(error)}") from error
    if config.hidden_act != "silu":
        raise EngineError(f"hidden_act {config.hidden_act!r} in {path} is not supported; the torch engine runs 'silu'")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise EngineError(f"{path} asks for sliding-window attention, which the torch engine does not run")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, rotary_scale = rotary_frequencies(config, head_dim)
    attention_bias = getattr(config, "attention_bias", False)
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=model_type == "qwen2" or attention_bias,
        out_bias=model_type != "qwen2" and attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        qk_norm=model_type == "qwen3",
        dtype=dtype or config.dtype or torch.float32,
        inv_freq=inv_freq,
        rotary_scale=rotary_scale,
    )


def rotary_frequencies(config, head_dim: int) -> tuple[Tensor, float]:
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"rotary embedding {kind!r} is not one that the torch engine runs: {', '.join(ROPE_TYPES)}")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / rope["rope_theta"] ** exponents, 1.0


class RMSNorm:
    """Root mean square norm: x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps, self.size = weight, eps, weight.shape[-1]
        self._scaled = weight * self.size**0.5
        self._floor = torch.tensor((self.size * eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    def assign(self, other: "RMSNorm") -> None:
        """Copy the weight of `other` into this norm, in place."""
        self.weight.copy_(other.weight)
        self._scaled.copy_(other._scaled)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, (self.size,), None, self.eps) * self.weight
        # sqrt(n) / hypot(|x|, sqrt(n eps)) is the same factor in half the operations.
        magnitude = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(magnitude, self._floor)).mul_(self._scaled)


@dataclass(frozen=True)
class Layer:
    """One transformer block; linear weights are [out, in], biases None where the model has none."""

    attention_norm: RMSNorm
    qkv: Tensor
    """Fused projection weight: rows of all query heads, then key heads, then value heads."""
    qkv_bias: Tensor | None
    qk_norm: RMSNorm | None
    """Norm of queries and keys, over the last dimension of [heads + kv_heads, head_dim]; None without one."""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: RMSNorm
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def assign(self, other: "Layer") -> None:
        """Copy the weights of `other` into this layer, in place."""
        for field in fields(self):
            old, new = getattr(self, field.name), getattr(other, field.name)
            if isinstance(old, RMSNorm):
                old.assign(new)
            elif old is not None:
                old.copy_(new)

    def differing(self, other: "Layer") -> Iterator[str]:
        """Names of the fields whose values differ from those of `other`."""
        for field in fields(self):
            old, new = getattr(self, field.name), getattr(other, field.name)
            if isinstance(old, RMSNorm):
                old, new = old.weight, new.weight
            if old is not None and not torch.equal(old, new):
                yield field.name


class PrefillRows(Protocol):
    """Cache rows of a prefill: they store its keys and values, and its queries attend to them."""

    def store(self, layer: int, heads: Tensor) -> None:
        """Store keys and values. `heads`: [T, 2 * kv_heads, head_dim], rotated keys, then values."""

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Store the new keys and values in the cache, and let the queries attend causally to the cache. `heads`: [T,
        heads + 2 * kv_heads, head_dim], queries, keys and values of T new tokens; returns [T, heads * head_dim]."""


class Decoder:
    """One set of weights, ready to run. It shares no storage with the tensors that it is made from."""

    def __init__(self, shape: DecoderShape, tensors: Mapping[str, Tensor], rotations: Tensor):
        self.shape = shape
        self.rotations = rotations
        self.device, self.dtype = rotations.device, shape.dtype
        check_tensors(shape.tensors(), shape.tied, tensors)
        # Rotary pairs (i, i + head_dim / 2) become neighbours, so that a pair is one complex number.
        self._pairs = torch.arange(shape.head_dim).view(2, -1).t().reshape(-1)
        self.embedding = self._own(tensors["model.embed_tokens.weight"])
        self.norm = RMSNorm(self._own(tensors["model.norm.weight"]), shape.norm_eps)
        self.output = self.embedding if shape.tied else self._own(tensors["lm_head.weight"])
        self.layers = [self._layer(tensors, f"model.layers.{layer}.") for layer in range(shape.layers)]
        self._last_keys_values = self._without_queries(self.layers[-1])

    def refill(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights in place, layer by layer; a graph that was captured with them computes with the new ones.
        Raises EngineError, with the old weights unchanged, for tensors of another model."""
        check_tensors(self.shape.tensors(), self.shape.tied, tensors)
        self.embedding.copy_(tensors["model.embed_tokens.weight"])
        self.norm.assign(RMSNorm(self._own(tensors["model.norm.weight"]), self.shape.norm_eps))
        if not self.shape.tied:
            self.output.copy_(tensors["lm_head.weight"])
        for index, layer in enumerate(self.layers):
            layer.assign(self._layer(tensors, f"model.layers.{index}."))
        self._last_keys_values.assign(self._without_queries(self.layers[-1]))

    def differing(self, tensors: Mapping[str, Tensor]) -> Iterator[str]:
        """Names of this decoder's tensors whose values differ from those of `tensors`, a model's weights by their
        Hugging Face names. A fused projection, such as query, key and value, has one name."""
        whole = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.shape.tied:
            whole["lm_head.weight"] = self.output
        yield from (name for name, held in whole.items() if not torch.equal(held, tensors[name].to(held)))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            given = self._layer(tensors, prefix)
            yield from (prefix + part for part in layer.differing(given))
        if any(self._last_keys_values.differing(self._without_queries(given))):
            yield f"{prefix}qkv without queries"

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype, copy=True)

    def _layer(self, tensors: Mapping[str, Tensor], prefix: str) -> Layer:
        shape = self.shape

        def fused(*names: str, bias: bool = False) -> Tensor | None:
            keys = [f"{prefix}{name}.{'bias' if bias else 'weight'}" for name in names]
            if bias and keys[0] not in tensors:
                return None
            parts = [tensors[key].detach().to(self.device, self.dtype) for key in keys]
            parts = [
                self._pair_rotary(part) if name.endswith(("q_proj", "k_proj", "q_norm", "k_norm")) else part
                for name, part in zip(names, parts, strict=True)
            ]
            return torch.cat(parts)

        qk_norm = None
        q_norm = fused("self_attn.q_norm") if shape.qk_norm else None
        k_norm = fused("self_attn.k_norm") if shape.qk_norm else None
        if q_norm is not None and k_norm is not None:
            both = torch.cat([q_norm.expand(shape.heads, -1), k_norm.expand(shape.kv_heads, -1)])
            qk_norm = RMSNorm(both, shape.norm_eps)
        qkv, gate_up = [f"self_attn.{part}_proj" for part in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        return Layer(
            attention_norm=RMSNorm(fused("input_layernorm"), shape.norm_eps),
            qkv=fused(*qkv),
            qkv_bias=fused(*qkv, bias=True),
            qk_norm=qk_norm,
            out=fused("self_attn.o_proj"),
            out_bias=fused("self_attn.o_proj", bias=True),
            mlp_norm=RMSNorm(fused("post_attention_layernorm"), shape.norm_eps),
            gate_up=fused(*gate_up),
            gate_up_bias=fused(*gate_up, bias=True),
            down=fused("mlp.down_proj"),
            down_bias=fused("mlp.down_proj", bias=True),
        )

    def _without_queries(self, layer: Layer) -> Layer:
        """The layer with only its key and value projections, for a prefill whose queries are not needed."""
        shape = self.shape
        first = shape.heads * shape.head_dim
        return replace(
            layer,
            qkv=layer.qkv[first:],
            qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias[first:],
            qk_norm=layer.qk_norm and RMSNorm(layer.qk_norm.weight[shape.heads :], shape.norm_eps),
        )

    def _pair_rotary(self, part: Tensor) -> Tensor:
        return part.view(-1, self.shape.head_dim, *part.shape[1:])[:, self._pairs].reshape(part.shape)

    def decode(self, tokens: Tensor, positions: Tensor, groups: list) -> Tensor:
        """Logits, float32 [n, vocabulary], of the next token of n sequences.

        `tokens`, `positions`: int64 [n], the last token of each sequence and its position. `groups`: the parts of the
        KV cache (`LengthGroup` or `Rows`), which together hold the n sequences in order. A part holds the rows from its
        `start` to its `stop`; it stores the rows' new keys and values, and computes their attention.
        """
        x = F.embedding(tokens, self.embedding)
        rotation = self.rotations[positions].unsqueeze(1)
        for index, layer in enumerate(self.layers):
            (heads,) = self._project(layer, x, rotation)
            attended = [group.attend(index, heads[group.start : group.stop]) for group in groups]
            x = self._mix(layer, x, attended[0] if len(groups) == 1 else torch.cat(attended))
        return F.linear(self.norm(x), self.output).float()

    def prefill(
        self, tokens: Tensor, start: int = 0, prefix: Callable[[int], Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Yield keys and values, [n, length, 2 * kv_heads, head_dim], of each layer for right-padded `tokens`.

        `tokens`: int64 [n, length]; attention is causal, so padding does not affect earlier tokens. `prefix(layer)`:
        keys and values of the `start` tokens before `tokens` in each row; None without any.
        """
        shape, length = self.shape, tokens.shape[1]
        x = F.embedding(tokens.reshape(-1), self.embedding)
        rotation = self.rotations[start : start + length].unsqueeze(1)
        for index, layer in enumerate(self.layers[:-1]):
            heads = self._project(layer, x, rotation)
            yield heads[:, :, shape.heads :]
            attended = self._attend_with_prefix(prefix(index), heads) if prefix else self._attend(heads)
            x = self._mix(layer, x, attended)
        yield self._project(self._last_keys_values, x, rotation)

    def fill(self, tokens: Tensor, positions: Tensor, rows: "PrefillRows") -> None:
        """Store the keys and values of several contexts in the KV cache; computes no logits. `tokens`, `positions`:
        int64 [T], the contexts' token ids and the position of each in its own context, concatenated without padding.
        `rows`: stores the keys and values of each layer, and computes the attention."""
        x = F.embedding(tokens, self.embedding)
        rotation = self.rotations[positions].unsqueeze(1)
        for index, layer in enumerate(self.layers[:-1]):
            (heads,) = self._project(layer, x, rotation)
            x = self._mix(layer, x, rows.attend(index, heads))
        (heads,) = self._project(self._last_keys_values, x, rotation)
        rows.store(len(self.layers) - 1, heads)

    def score(self, tokens: Tensor) -> Tensor:
        """Log-probabilities, float32 [T - 1], of `tokens[1:]` (int64 [T]) given the tokens before each."""
        x = F.embedding(tokens[:-1], self.embedding)
        rotation = self.rotations[: len(x)].unsqueeze(1)
        for layer in self.layers:
            x = self._mix(layer, x, self._attend(self._project(layer, x, rotation)))
        scored = []
        for hidden, targets in zip(
            self.norm(x).split(SCORED_TOKENS), tokens[1:, None].split(SCORED_TOKENS), strict=True
        ):
            logprobs = torch.log_softmax(F.linear(hidden, self.output).float(), dim=-1)
            scored.append(logprobs.gather(1, targets)[:, 0])
        return torch.cat(scored)

    def _attend(self, heads: Tensor) -> Tensor:
        """Causal attention; `heads`: rotated [n, length, heads + 2 * kv_heads, head_dim]. Returns [n * length, heads *
        head_dim]."""
        shape = self.shape
        queries, keys, values = heads.transpose(1, 2).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
        )
        return attended.transpose(1, 2).reshape(heads.shape[0] * heads.shape[1], -1)

    def _attend_with_prefix(self, prefix: Tensor, heads: Tensor) -> Tensor:
        """Causal attention of the new tokens of n rows to `start` cached tokens before them, and to each other.

        `prefix`: keys and values of the cached tokens, [n, start, 2 * kv_heads, head_dim]. `heads`: rotated queries,
        keys and values of the new tokens, [n, length, heads + 2 * kv_heads, head_dim]. Returns [n * length, heads *
        head_dim]. Queries attend in blocks, so that few keys are read that no query may see.
        """
        shape, (_, start, *_), length = self.shape, prefix.shape, heads.shape[1]
        queries = heads[:, :, : shape.heads].transpose(1, 2)
        held = torch.cat([prefix, heads[:, :, shape.heads :]], dim=1).transpose(1, 2)
        keys, values = held.split([shape.kv_heads, shape.kv_heads], dim=1)
        blocks = []
        for first in range(0, length, ATTENTION_BLOCK):
            block = queries[:, :, first : first + ATTENTION_BLOCK]
            seen = start + first + block.shape[2]
            visible = torch.ones(block.shape[2], seen, dtype=torch.bool, device=self.device).tril(start + first)
            blocks.append(
                F.scaled_dot_product_attention(
                    block, keys[:, :, :seen], values[:, :, :seen], visible, enable_gqa=shape.heads != shape.kv_heads
                )
            )
        return torch.cat(blocks, dim=2).transpose(1, 2).reshape(heads.shape[0] * length, -1)

    def _project(self, layer: Layer, x: Tensor, rotation: Tensor) -> Tensor:
        """Queries, keys and values, [n, length, heads + 2 * kv_heads, head_dim], of n rows concatenated in `x`.

        Queries and keys are rotated by `rotation`, [length, 1, head_dim / 2]. A layer without query projection gives no
        queries.
        """
        shape = self.shape
        qkv = F.linear(layer.attention_norm(x), layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, len(rotation), qkv.shape[-1] // shape.head_dim, shape.head_dim)
        queries_keys = heads[:, :, : -shape.kv_heads]
        normed = queries_keys
        if layer.qk_norm is not None:
            normed = layer.qk_norm(queries_keys)
        rotated = torch.view_as_complex(normed.float().unflatten(-1, (-1, 2))) * rotation
        queries_keys.copy_(torch.view_as_real(rotated).flatten(-2))
        return heads

    def _mix(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The part of a transformer block after attention: output projection and MLP, each added to its input.
        `attended`: result of attention. Overwrites `x`, the block's input."""
        x = x.addmm_(attended, layer.out.t())
        if layer.out_bias is not None:
            x = x + layer.out_bias
        gate, up = F.linear(layer.mlp_norm(x), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        x = x.addmm_(F.silu(gate).mul_(up), layer.down.t())
        return x if layer.down_bias is None else x + layer.down_bias


def make_rotations(shape: DecoderShape, positions: int, device: torch.device) -> Tensor:
    """Rotary factors of the positions 0 to `positions` - 1: complex64 [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), shape.inv_freq.float())
    return torch.polar(torch.full_like(angles, shape.rotary_scale), angles).to(device)
