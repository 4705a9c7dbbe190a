"""The form in which peft, vLLM and others read an adapter: a folder of two files. It is read without torch."""

from pathlib import Path
from typing import Any

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""what peft puts before the names of the model"""


def description(rank: int, alpha: float, targets: list[str], base: Path | str) -> dict[str, Any]:
    """What is in `CONFIG`; `base`: the model folder that it belongs to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
