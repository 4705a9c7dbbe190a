"""Validation of requests and weights that all engines share."""

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from april.workers.engines.base import EngineError, Request

if TYPE_CHECKING:
    import torch

    from april.workers.engines.entry import EngineEntry

OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_request(
    request: Request, vocabulary: int, max_context: int, live: Container[int], entry: "type[EngineEntry] | None" = None
) -> None:
    """Raise EngineError for a request that can never run, or that needs a feature which `entry` does not declare."""
    name, tokens = f"request {request.id}", np.asarray(request.tokens)
    if request.id in live:
        raise EngineError(f"{name} is live already; cancel it or use another id")
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu":
        raise EngineError(f"{name} has no tokens; give a one-dimensional integer array with at least one")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise EngineError(
            f"{name} has token ids from {tokens.min()} to {tokens.max()}; "
            f"the model's vocabulary is 0 to {vocabulary - 1}"
        )
    if request.max_new_tokens < 1:
        raise EngineError(f"{name} has max_new_tokens = {request.max_new_tokens}; at least 1 is needed")
    if len(tokens) + request.max_new_tokens > max_context:
        raise EngineError(
            f"{name} needs {len(tokens)} + {request.max_new_tokens} tokens but max_context = {max_context}; "
            "shorten it or raise max_context"
        )
    if not (0 <= request.temperature < float("inf") and 0 < request.top_p <= 1 and request.top_k >= 0):
        raise EngineError(
            f"{name} has temperature = {request.temperature}, top_p = {request.top_p}, top_k = {request.top_k}; "
            "temperature and top_k are at least 0, top_p above 0 and at most 1"
        )
    if not 0 <= request.min_p < 1:
        raise EngineError(f"{name} has min_p = {request.min_p}; it is at least 0 and below 1")
    if entry and not entry.returns_supports and (request.with_support or request.min_p):
        raise EngineError(
            f"{name} has with_support = {request.with_support}, min_p = {request.min_p}, and the engine does not "
            "return the ids that a token was drawn from; use False and 0"
        )
    if entry and not entry.truncates_sampling and (request.top_k or request.top_p != 1):
        raise EngineError(
            f"{name} has top_k = {request.top_k}, top_p = {request.top_p}, and the engine does not cut the "
            "distribution; use 0 and 1"
        )


def folder_tensors(folder: Path) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Tensor shapes of a Hugging Face folder by name, and whether its output projection is tied to the embedding."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no .safetensors file; save the model with save_pretrained")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    tied = OUTPUT not in shapes or json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    if tied:
        shapes.pop(OUTPUT, None)
    return shapes, tied


def check_heads(expected: Mapping[str, tuple[int, ...]], tied: bool, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise EngineError unless names and `shapes` are exactly the `expected` ones.

    `tied`: the output projection is tied to the embedding, and may be present or not.
    """
    missing = sorted(expected.keys() - shapes.keys())
    allowed = dict(expected) | ({OUTPUT: expected[EMBEDDING]} if tied and EMBEDDING in expected else {})
    extra = sorted(shapes.keys() - allowed.keys())
    if missing or extra:
        kind, names = ("lack", missing) if missing else ("have an unknown", extra)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise EngineError(
            f"the weights {kind} tensor {names[0]!r}{more}; send exactly the tensors that config.json describes"
        )
    for name, shape in shapes.items():
        if tuple(shape) != allowed[name]:
            raise EngineError(
                f"tensor {name!r} has shape {tuple(shape)} but config.json describes {allowed[name]}; "
                "send the weights of the same model"
            )


def check_tensors(expected: Mapping[str, tuple[int, ...]], tied: bool, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raise EngineError unless names and shapes are as `expected`, see `check_heads`, and all values are finite."""
    check_heads(expected, tied, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise EngineError(f"tensor {name!r} has values that are not finite; the learner must not publish it")
