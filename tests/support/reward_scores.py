"""Helpers for tests of verifiers."""

import time

PATIENCE_S = 150.0


def collect(pool, count, pending=0):
    """Collect the scores of `count` items, by key; fails if an item is scored twice.

    `pending`: number of further items that stay in the pool.
    """
    scores, deadline_s = {}, time.monotonic() + PATIENCE_S
    while len(scores) < count:
        for score in pool.poll():
            assert score.key not in scores
            scores[score.key] = score
        assert time.monotonic() < deadline_s, f"{count - len(scores)} items never came back"
        time.sleep(0.001)
    assert pool.pending == pending
    assert pool.poll() == []
    return scores
