"""Detection of repetitive responses: the end of the response repeats one sequence of tokens."""

import numpy as np

TAIL = 512
"""Tokens at the end of a response that are examined."""
MIN_TOKENS, MIN_REPEATS = 48, 4
"""Least total length of a repetition, in tokens, and least number of repeats."""
MAX_PERIODS = 8
"""Candidate periods that are tried: the shortest distances at which the last tokens occurred before."""
WINDOW_TOKENS = 4
"""Last tokens of a response that are searched for to find candidate periods."""


def is_repetitive(response: np.ndarray) -> bool:
    """Whether `response`, int32 [T], ends in a repetition."""
    if len(response) < MIN_TOKENS:
        return False
    tail = response[-TAIL:]
    windows = np.lib.stride_tricks.sliding_window_view(tail, WINDOW_TOKENS)
    periods = len(windows) - 1 - np.flatnonzero((windows[:-1] == windows[-1]).all(axis=1))
    return any(repeats_with_period(tail, int(period)) for period in periods[::-1][:MAX_PERIODS])


def repeats_with_period(tail: np.ndarray, period: int) -> bool:
    length = max(MIN_TOKENS, MIN_REPEATS * period)
    if length > len(tail):
        return False
    end = tail[-length:]
    return bool((end[period:] == end[:-period]).all())
