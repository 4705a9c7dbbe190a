"""Delays before restarts of a failing process: none before the first, then growing, so that a fault of a minute does
not use up all restarts."""

LONGEST_DELAY_S = 60.0
"""Longest delay, and the delay before the last allowed restart."""
STEADY_S = 120.0
"""A process that has worked for this long since its start gets all its restarts back."""
DOUBLINGS = 10
"""After this many doublings a delay grows no further."""


def delay_s(restart: int, most: int) -> float:
    """Seconds to wait before restart number `restart` (from 1), if `most` restarts without success are allowed.

    Delays double from one second on, but are at least those obtained by halving backwards from the last delay of 60 s:
    with 3 restarts they are 0, 30 and 60 s.
    """
    if restart <= 1:
        return 0.0
    growing = 2.0 ** min(restart - 1, DOUBLINGS) - 1
    return min(LONGEST_DELAY_S, max(growing, LONGEST_DELAY_S * 2.0 ** (restart - most)))
