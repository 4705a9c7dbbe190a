"""How much of a model is trained where that is an adapter, from the heads of its weights' files alone."""

from pathlib import Path

from april.broker.fingerprints import tensors_of
from april.config import Config
from april.config.lora import adapted

NOT_ADAPTED = (".experts.", ".mlp.gate.")
"""in names of matrices that are no linear layers to the learner: experts, which it keeps as one tensor, and routers"""


def linears_of(folder: Path) -> dict[str, int]:
    """Inputs and outputs together of each linear layer within a model's layers, by its name."""
    tensors = (tensor for path in sorted(folder.glob("*.safetensors")) for tensor in tensors_of(path))
    return {
        tensor.name.removesuffix(".weight"): sum(tensor.shape)
        for tensor in tensors
        if ".layers." in tensor.name
        and tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and not any(part in tensor.name for part in NOT_ADAPTED)
    }


def adapter_parameters(config: Config) -> int:
    """Of the adapter that `[lora]` describes. Raises ConfigError where the model lacks what it is for."""
    linears = linears_of(config.model.path)
    return config.lora.rank * sum(linears[name] for name in adapted(linears, config.lora))
