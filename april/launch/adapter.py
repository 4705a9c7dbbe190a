"""Counts the trained parameters of a run with an adapter, from the headers of the weight files alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from april.broker.fingerprints import StoredTensor, tensors_of
from april.config import Config
from april.config.lora import layers_to_adapt

NOT_ADAPTED = (".experts.", ".mlp.gate.")
"""Parts of the names of matrices that get no adapter: experts, which the learner keeps as one tensor, and routers."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Suffixes of the names of the embedding and the output head."""


def linears_of(folder: Path) -> dict[str, int]:
    """Input size plus output size of each linear layer inside the transformer layers, by name."""
    return {
        tensor.name.removesuffix(".weight"): sum(tensor.shape)
        for tensor in all_tensors(folder)
        if ".layers." in tensor.name
        and tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and not any(part in tensor.name for part in NOT_ADAPTED)
    }


def adapter_parameters(config: Config) -> int:
    """Trained parameters with the `[lora]` section: the adapter, and whole tensors trained with it. Raises ConfigError
    if the model lacks a layer that the section names."""
    linears = linears_of(config.model.path)
    width = sum(linears[name] for name in layers_to_adapt(linears, config.lora))
    return config.lora.rank * width + whole_parameters(config)


def whole_parameters(config: Config) -> int:
    """Parameters of the model that are trained in full, in addition to the adapter."""
    if not config.lora.embedding:
        return 0
    folder = config.model.path
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    names = EMBEDDING if tied else (EMBEDDING, HEAD)
    return sum(math.prod(tensor.shape) for tensor in all_tensors(folder) if tensor.name.endswith(names))


def all_tensors(folder: Path) -> Iterator[StoredTensor]:
    return (tensor for path in sorted(folder.glob("*.safetensors")) for tensor in tensors_of(path))
