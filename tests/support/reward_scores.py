"""Leases to score, and the scores that come of them."""

import time

from april import wire

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


def grant_of(lease_id, group_scored=()):
    return wire.Grant(
        lease_id, task_index=0, index=0, scoring=True, max_new_tokens=9, seed=0, finish_reason="stop", hand_over=False,
        group_scored=list(group_scored), turns=0, turn_start=0, state=b"", stop_token_ids=[],
    )  # fmt: skip


def task_of(reward):
    return wire.Task(0, False, label="2", reward=reward, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
