"""Helpers for tests of verifiers."""

import time

PATIENCE_S = 60.0


def collect(pool, count):
    """Collect the scores of `count` items, by key; fails if an item is scored twice."""
    scores, deadline_s = {}, time.monotonic() + PATIENCE_S
    while len(scores) < count:
        for score in pool.poll():
            assert score.key not in scores
            scores[score.key] = score
        assert time.monotonic() < deadline_s, f"{count - len(scores)} items never came back"
        time.sleep(0.001)
    assert pool.pending == 0
    assert pool.poll() == []
    return scores
