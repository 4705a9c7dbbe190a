"""The order in which an epoch hands out the rows of one or several sources: the same wherever it is asked for."""

import numpy as np


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [count]: row indices in the order of this epoch, the same wherever and whenever it is asked for."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def mixed_order(counts: list[int], weights: list[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64: rows of this epoch in their order, as indices into the sources laid end to end.

    A source of n rows with weight w gives round(w * n) of them, at least one: its rows go round in passes, each in
    an order of its own, and every epoch takes up where the one before it stopped. So each row is drawn equally often,
    whatever the weight.
    """
    parts, first = [], 0
    for source, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        parts.append(first + share(count, drawn(count, weight), (seed, source), epoch, shuffle))
        first += count
    rows = np.concatenate(parts)
    return rows[epoch_order(len(rows), seed, epoch, shuffle)]


def drawn(count: int, weight: float) -> int:
    """Rows of a source in an epoch."""
    return max(1, round(weight * count))


def share(count: int, wanted: int, seed: tuple[int, int], epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [wanted]: the next rows of a source's passes."""
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
