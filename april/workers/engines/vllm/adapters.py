"""Of which ranks a vLLM server takes adapters."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""that it makes room for"""


def room_for(rank: int) -> int | None:
    """The smallest of `RANKS` that it fits into; None where it is above all."""
    return next((room for room in RANKS if room >= rank), None)
