"""What a server must not be: one of another model, one that takes no weights while it runs, one whose samples are not
the policy's."""

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
"""keys of config.json that two folders of one model agree in"""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def check_server(info: Mapping[str, Any]) -> None:
    """Refuse what a server says of itself (/server_info). Raises ServerFailed."""
    for key in ("pp_size", "dp_size"):
        if info.get(key, 1) != 1:
            raise ServerFailed(
                f"the server runs with {key} = {info[key]}, under which it takes no weights while it runs; "
                "use one worker for each replica, and tensor parallelism inside it"
            )
    check_speculation(info, info.get("device", "cuda"))


def check_model(info: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a server of another model than that of config.json, `own`, as far as it says which one it has: its
    architecture, and all sizes where its folder can be read here. Raises ServerFailed."""
    folder, said = str(info.get("model_path")), {}
    with contextlib.suppress(OSError, ValueError):
        said = json.loads((Path(folder) / "config.json").read_bytes())
    said |= {key: info[key] for key in ARCHITECTURE if key in info}
    for key in (*ARCHITECTURE, *SHAPE):
        if None not in (said.get(key), own.get(key)) and said[key] != own[key]:
            raise ServerFailed(
                f"the server's model {folder} has {key} = {said[key]!r} where key 'model.path' has {own[key]!r}; "
                "start it with that folder, or give its folder as model.path"
            )


def check_ranks(info: Mapping[str, Any], expected: int) -> None:
    """Refuse a server that was started here with other tensor-parallel ranks than were counted. Raises ServerFailed."""
    if info.get("tp_size", expected) != expected:
        raise ServerFailed(
            f"the server runs with {info['tp_size']} tensor-parallel ranks where key 'engine.server' was read as "
            f"{expected}, by which devices are counted; spell it engine.server.tp_size"
        )


def check_pause(pause: str, stream_tokens: int) -> None:
    """Refuse one that leaves versions unknown. Raises EngineError."""
    if pause != "abort" and stream_tokens != 1:
        raise EngineError(
            f"pause = {pause!r} leaves tokens unsent whose version is known only at the end; "
            "set stream_tokens = 1, or use pause = 'abort'"
        )


def check_speculation(options: Mapping[str, Any], device: str, rocm: bool = False) -> None:
    """Refuse speculative decoding that draws other tokens than the policy would. Raises ServerFailed.

    Where SGLang 0.5.23 has no kernels that sample while they verify guesses, it takes the likeliest token whatever the
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
