"""Shared prefixes of contexts, such as a group's prompt or a common template, so that each is prefilled only once."""

from collections.abc import Sequence

import numpy as np

from april.workers.engines.embedded.slot_table import SlotTable

MIN_SHARED_TOKENS = 64
"""Shortest prefix worth sharing; below it, recomputing is cheaper than prefilling the rest separately."""
Wave = dict[int, tuple[int, int]]
"""Slots to prefill together: slot -> (source slot, leading tokens to copy from it), or (itself, 0) to copy none."""


def shared_prefixes(table: SlotTable, unfilled: Sequence[int], filled: Sequence[int]) -> list[Wave]:
    """Waves in which to prefill the `unfilled` slots; a slot's wave comes after that of its source slot.

    `filled`: slots whose context is in the cache already. The last token of a context does not count: it is decoded.
    """
    wave_of = dict.fromkeys(filled, -1)
    waves: list[Wave] = []
    for slot in sorted(unfilled, key=lambda slot: -int(table.length[slot])):
        other, shared = longest_shared_prefix(table, slot, np.fromiter(wave_of, np.int64))
        wave_of[slot] = wave_of[other] + 1 if shared else 0
        while len(waves) <= wave_of[slot]:
            waves.append({})
        waves[wave_of[slot]][slot] = (other, shared)
    return waves


def longest_shared_prefix(table: SlotTable, slot: int, others: np.ndarray) -> tuple[int, int]:
    """(slot of `others` with the longest common prefix, its tokens); (the slot itself, 0) if none is worth sharing.

    A prefix is worth sharing from MIN_SHARED_TOKENS on, or if it is the whole context.
    """
    stored = int(table.length[slot]) - 1
    enough = min(stored, MIN_SHARED_TOKENS)
    if not enough or not len(others):
        return slot, 0
    tokens, own = table.tokens, table.tokens[slot, :stored]
    alike = others[(table.length[others] > enough) & (tokens[others, enough - 1] == own[enough - 1])]
    alike = alike[(tokens[alike, :enough] == own[:enough]).all(axis=1)]
    if not len(alike):
        return slot, 0
    same = tokens[alike, :stored] == own
    shared = np.minimum(np.where(same.all(axis=1), stored, same.argmin(axis=1)), table.length[alike] - 1)
    best = int(shared.argmax())
    return int(alike[best]), int(shared[best])
