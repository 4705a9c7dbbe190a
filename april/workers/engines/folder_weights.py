"""The weights of a Hugging Face folder, as an engine takes them where no learner sends any."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from april.workers.engines.base import EngineError


def load_folder_weights(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder's safetensors files, one or many."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no .safetensors file; save the model with save_pretrained")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
