"""Two runs' samples of the same prompt."""

from typing import Any

import numpy as np

from april.dashboard.index import GONE, SampleIndex
from april.dashboard.one import excerpts

MOST_PROMPTS = 50


def shared_prompts(one: SampleIndex, other: SampleIndex, offset: int = 0) -> dict[str, Any]:
    """Prompts of which both have samples, where their mean rewards differ most first: `total`, and of a page of them
    `prompt`, its text's end, and for each run how many samples there are and their mean reward; `reading`: whether some
    may be lacking, as their files were still being read."""
    reading = any(index.steps_read < index.steps_kept for index in (one, other))
    prompts_a, counts_a, rewards_a, where = rewards(one)
    prompts_b, counts_b, rewards_b, _ = rewards(other)
    both, at_a, at_b = np.intersect1d(prompts_a, prompts_b, assume_unique=True, return_indices=True)
    difference = rewards_b[at_b] - rewards_a[at_a]
    order = np.argsort(-np.abs(difference), kind="stable")[offset : offset + MOST_PROMPTS]
    with one.lock:
        places = [one.place(row) for row in where[at_a[order]].tolist()]
    texts = excerpts(one.run_dir, places)
    return {
        "total": len(both),
        "page": MOST_PROMPTS,
        "reading": reading,
        "prompts": [
            {
                "prompt": f"{int(both[n]):016x}",
                "text": text and text["prompt"],
                "samples": [int(counts_a[at_a[n]]), int(counts_b[at_b[n]])],
                "reward": [float(rewards_a[at_a[n]]), float(rewards_b[at_b[n]])],
            }
            for n, text in zip(order.tolist(), texts, strict=True)
        ],
    }


def rewards(index: SampleIndex) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each prompt: its digest, how many samples with a reward it has, its mean, and the row of one of them."""
    with index.lock:
        rows = np.flatnonzero((index.column("step") != GONE) & np.isfinite(index.column("reward")))
        prompts, scores = index.column("prompt")[rows], index.column("reward")[rows]
    found, where, numbers, counts = np.unique(prompts, return_index=True, return_inverse=True, return_counts=True)
    sums = np.bincount(numbers, weights=scores, minlength=len(found))
    return found, counts, sums / np.maximum(counts, 1), rows[where]
