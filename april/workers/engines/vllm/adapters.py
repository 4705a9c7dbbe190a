"""LoRA ranks that a vLLM server supports."""

SUPPORTED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


def supported_rank(rank: int) -> int | None:
    """The smallest supported rank that is at least `rank`; None if there is none."""
    return next((supported for supported in SUPPORTED_RANKS if supported >= rank), None)
