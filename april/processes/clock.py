"""Unix time that never jumps: wall-clock at import, monotonic from there on."""

import time

_OFFSET_S = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, for deadlines as well as for the record."""
    return time.monotonic() + _OFFSET_S
