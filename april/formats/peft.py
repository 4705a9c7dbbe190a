"""The adapter folder that peft and vLLM read: a configuration and a file of tensors. Imports no torch."""

from pathlib import Path
from typing import Any

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix that peft puts before the model's tensor names."""


def description(rank: int, alpha: float, targets: list[str], base: Path | str) -> dict[str, Any]:
    """The content of `CONFIG`. `base`: folder of the model that the adapter belongs to."""
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
