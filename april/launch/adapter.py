"""How much of a model is trained where that is an adapter, from the heads of its weights' files alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from april.broker.fingerprints import Tensor, tensors_of
from april.config import Config
from april.config.lora import adapted

NOT_ADAPTED = (".experts.", ".mlp.gate.")
"""in names of matrices that are no linear layers to the learner: experts, which it keeps as one tensor, and routers"""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""how their names end"""


def linears_of(folder: Path) -> dict[str, int]:
    """Inputs and outputs together of each linear layer within a model's layers, by its name."""
    return {
        tensor.name.removesuffix(".weight"): sum(tensor.shape)
        for tensor in all_tensors(folder)
        if ".layers." in tensor.name
        and tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and not any(part in tensor.name for part in NOT_ADAPTED)
    }


def adapter_parameters(config: Config) -> int:
    """Of the adapter that `[lora]` describes, and of what is trained beside it. Raises ConfigError where the model
    lacks what it is for."""
    linears = linears_of(config.model.path)
    return config.lora.rank * sum(linears[name] for name in adapted(linears, config.lora)) + whole_parameters(config)


def whole_parameters(config: Config) -> int:
    """Of the model's own, those that are trained beside the adapter."""
    if not config.lora.embedding:
        return 0
    folder = config.model.path
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    names = EMBEDDING if tied else (EMBEDDING, HEAD)
    return sum(math.prod(tensor.shape) for tensor in all_tensors(folder) if tensor.name.endswith(names))


def all_tensors(folder: Path) -> Iterator[Tensor]:
    return (tensor for path in sorted(folder.glob("*.safetensors")) for tensor in tensors_of(path))
