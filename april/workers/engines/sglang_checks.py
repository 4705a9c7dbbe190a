"""What a server must not be: one that takes no weights while it runs, or whose samples are not the policy's."""

from collections.abc import Mapping
from typing import Any

from april.workers.engines.sglang_server import ServerFailed

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
