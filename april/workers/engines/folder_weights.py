"""Loads the weights of a Hugging Face folder, for engines without a learner."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from april.workers.engines.base import EngineError


def load_folder_weights(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by name. Raises EngineError if there is none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no .safetensors file; save the model with save_pretrained")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
