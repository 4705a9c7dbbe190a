"""Unix time that never jumps: the wall clock at import, continued by the monotonic clock."""

import time

_OFFSET_S = time.time() - time.monotonic()


def now() -> float:
    """Unix time in seconds, for deadlines and for records."""
    return time.monotonic() + _OFFSET_S
