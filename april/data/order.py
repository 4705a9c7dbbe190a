"""Order of the rows of one or several sources in an epoch: deterministic, given seed and epoch."""

import numpy as np


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [count]: row indices in the order of this epoch."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def mixed_order(counts: list[int], weights: list[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [rows of the epoch]: row indices in the order of this epoch, into the concatenation of all sources.

    A source of n rows with weight w contributes max(1, round(w * n)) rows. Its rows are drawn in passes, each pass
    with its own order, and an epoch continues where the previous one stopped. So every row of a source is drawn equally
    often, for any weight.
    """
    parts, offset = [], 0
    for source, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        parts.append(offset + source_rows(count, rows_per_epoch(count, weight), (seed, source), epoch, shuffle))
        offset += count
    rows = np.concatenate(parts)
    return rows[epoch_order(len(rows), seed, epoch, shuffle)]


def rows_per_epoch(count: int, weight: float) -> int:
    """Number of rows that a source contributes to an epoch."""
    return max(1, round(weight * count))


def source_rows(count: int, wanted: int, seed: tuple[int, int], epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [wanted]: rows of one source in this epoch, continued from the previous epoch's pass."""
    if wanted == count:
        return np.arange(count, dtype=np.int64)
    start, end = epoch * wanted, (epoch + 1) * wanted
    passes = range(start // count, (end - 1) // count + 1)
    rows = np.concatenate([pass_order(count, seed, number, shuffle) for number in passes])
    return rows[start - passes[0] * count : end - passes[0] * count]


def pass_order(count: int, seed: tuple[int, int], number: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence((*seed, number)))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)
