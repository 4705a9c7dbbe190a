"""Loads a LoRA adapter into a paused server, as a folder in PEFT's format that the server reads."""

import asyncio
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from april.formats import peft
from april.workers.engines.base import EngineError
from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.weights import SHARED_MEMORY, SNAPSHOT_PREFIX, UPDATE_S

if TYPE_CHECKING:
    import torch

    from april.weights.lane_messages import Adapter

log = logging.getLogger(__name__)


async def load_adapter(
    client: SGLangClient, model: Path, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]", version: str
) -> None:
    """Load an adapter into a paused server. Raises EngineError; the server then keeps its previous weights."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    try:
        with tempfile.TemporaryDirectory(prefix=SNAPSHOT_PREFIX, dir=parent) as folder:
            await asyncio.to_thread(write_adapter, Path(folder), model, adapter, tensors)
            await client.call("/load_lora_adapter", {"lora_path": folder, "weight_version": version}, UPDATE_S)
            log.info("the server has the adapter of version %s beside its model's weights", version)
    except OSError as error:
        raise EngineError(f"the adapter cannot be written to {parent} ({error}); make room there") from None


def write_adapter(folder: Path, model: Path, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]") -> None:
    """Write an adapter in PEFT's format. Raises EngineError for a tensor that is not finite, and OSError."""
    from safetensors.torch import save_file

    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise EngineError(f"tensor {name!r} has values that are not finite; the learner must not publish it")
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    rank = min(tensors[f"{layers[0]}.lora_A"].shape)
    targets = sorted({layer.rpartition(".")[2] for layer in layers})
    peft_config = peft.description(rank, adapter.scaling * rank, targets, model)
    (folder / peft.CONFIG).write_bytes(orjson.dumps(peft_config))
    prefixed = {f"{peft.PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(prefixed, folder / peft.TENSORS, metadata={"format": "pt"})
