"""Whether a response has got into a loop: its end is one stretch of tokens again and again."""

import numpy as np

TAIL = 512
"""tokens at the end that are looked at"""
LEAST, TIMES = 48, 4
"""a loop has so many tokens at least, and its stretch so many times"""
TRIED = 8
"""lengths of the stretch, the shortest ones at which the last tokens occurred before"""
LAST = 4
"""tokens by which these are found"""


def loops(response: np.ndarray) -> bool:
    """`response`: int32 [T]."""
    if len(response) < LEAST:
        return False
    tail = response[-TAIL:]
    windows = np.lib.stride_tricks.sliding_window_view(tail, LAST)
    periods = len(windows) - 1 - np.flatnonzero((windows[:-1] == windows[-1]).all(axis=1))
    return any(looped(tail, int(period)) for period in periods[::-1][:TRIED])


def looped(tail: np.ndarray, period: int) -> bool:
    length = max(LEAST, TIMES * period)
    if length > len(tail):
        return False
    end = tail[-length:]
    return bool((end[period:] == end[:-period]).all())
