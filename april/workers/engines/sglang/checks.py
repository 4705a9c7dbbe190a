"""Refuses unsuitable servers: of another model, unable to update weights, or not sampling from the policy."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.workers.engines.base import EngineError
from april.workers.engines.sglang.server import ServerFailed

ARCHITECTURE = ("model_type", "architectures")
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
"""Keys of config.json that must agree between two folders of one model."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def check_server(info: Mapping[str, Any]) -> None:
    """Raise ServerFailed for an unsuitable server; `info`: its /server_info."""
    for key in ("pp_size", "dp_size"):
        if info.get(key, 1) != 1:
            raise ServerFailed(
                f"the server runs with {key} = {info[key]}, under which it takes no weights while it runs; "
                "use one worker for each replica, and tensor parallelism inside it"
            )
    check_speculation(info, info.get("device", "cuda"))


def check_model(info: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ServerFailed if the server's model differs from that of `own`, the run's config.json.

    Compares the architecture, and all sizes if the server's model folder can be read on this machine.
    """
    folder, server_model = str(info.get("model_path")), {}
    with contextlib.suppress(OSError, ValueError):
        server_model = json.loads((Path(folder) / "config.json").read_bytes())
    server_model |= {key: info[key] for key in ARCHITECTURE if key in info}
    for key in (*ARCHITECTURE, *SHAPE):
        if None not in (server_model.get(key), own.get(key)) and server_model[key] != own[key]:
            raise ServerFailed(
                f"the server's model {folder} has {key} = {server_model[key]!r} where key 'model.path' has "
                f"{own[key]!r}; start it with that folder, or give its folder as model.path"
            )


def check_ranks(info: Mapping[str, Any], expected: int) -> None:
    """Raise ServerFailed if a server started by April has not the `expected` number of tensor-parallel ranks."""
    if info.get("tp_size", expected) != expected:
        raise ServerFailed(
            f"the server runs with {info['tp_size']} tensor-parallel ranks where key 'engine.server' was read as "
            f"{expected}, by which devices are counted; spell it engine.server.tp_size"
        )


def check_pause(pause: str, stream_tokens: int) -> None:
    """Raise EngineError for a pause mode under which a token's version would be unknown."""
    if pause != "abort" and stream_tokens != 1:
        raise EngineError(
            f"pause = {pause!r} leaves tokens unsent whose version is known only at the end; "
            "set stream_tokens = 1, or use pause = 'abort'"
        )


def check_speculation(options: Mapping[str, Any], device: str, rocm: bool = False) -> None:
    """Raise ServerFailed for speculative decoding that does not sample from the policy.

    On devices without kernels that sample during verification, SGLang 0.5.23 takes the likeliest token at any
    temperature: `_verify_uses_greedy` in its speculative/eagle_utils.py.
    """
    algorithm = options.get("speculative_algorithm")
    if not algorithm:
        return
    if device in ("cpu", "xpu") or (rocm and not options.get("speculative_use_rejection_sampling")):
        where = "an AMD accelerator without speculative_use_rejection_sampling" if rocm else f"device {device!r}"
        raise ServerFailed(
            f"key 'engine.server.speculative_algorithm' = {algorithm!r} cannot be: on {where} SGLang verifies guesses "
            "against the likeliest token, whatever the temperature, so that samples would not be the policy's; "
            "leave it out"
        )
    for key in THRESHOLDS:
        if options.get(key, 1.0) != 1.0:
            raise ServerFailed(
                f"key 'engine.server.{key}' = {options[key]} accepts guesses that the policy would not have drawn; "
                "leave it at 1.0"
            )
