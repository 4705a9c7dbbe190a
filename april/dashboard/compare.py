"""Compare two runs by the rewards of their samples of the same prompts."""

from typing import Any

import numpy as np

from april.dashboard.index import GONE, SampleIndex
from april.dashboard.one import excerpts

MAX_PROMPTS = 50


def shared_prompts(index_a: SampleIndex, index_b: SampleIndex, offset: int = 0) -> dict[str, Any]:
    """Prompts of which both have samples, first_rows their mean rewards differ most first: `total`, and of a page of
    them `prompt`, its text's end, and for each run how many samples there are and their mean reward; `reading`: whether
    some may be lacking, as their files were still being read."""
    reading = any(index.steps_read < index.steps_kept for index in (index_a, index_b))
    prompts_a, counts_a, rewards_a, first_rows = rewards(index_a)
    prompts_b, counts_b, rewards_b, _ = rewards(index_b)
    both, at_a, at_b = np.intersect1d(prompts_a, prompts_b, assume_unique=True, return_indices=True)
    difference = rewards_b[at_b] - rewards_a[at_a]
    order = np.argsort(-np.abs(difference), kind="stable")[offset : offset + MAX_PROMPTS]
    with index_a.lock:
        positions = [index_a.position(row) for row in first_rows[at_a[order]].tolist()]
    texts = excerpts(index_a.run_dir, positions)
    return {
        "total": len(both),
        "page": MAX_PROMPTS,
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
    """(prompt digests, samples with a reward, mean reward, row of one sample) of each prompt."""
    with index.lock:
        rows = np.flatnonzero((index.column("step") != GONE) & np.isfinite(index.column("reward")))
        prompts, scores = index.column("prompt")[rows], index.column("reward")[rows]
    digests, first_rows, numbers, counts = np.unique(
        prompts, return_index=True, return_inverse=True, return_counts=True
    )
    sums = np.bincount(numbers, weights=scores, minlength=len(digests))
    return digests, counts, sums / np.maximum(counts, 1), rows[first_rows]
