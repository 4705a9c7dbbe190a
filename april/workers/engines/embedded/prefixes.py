"""Which contexts begin alike, so that what they share is computed once: the prompt of a group, or a template of all."""

from collections.abc import Sequence

import numpy as np

from april.workers.engines.embedded.slot_table import SlotTable

LEAST_TOKENS = 64
"""fewer are computed again sooner than what follows them is computed apart"""
Wave = dict[int, tuple[int, int]]
"""slot -> (another slot, how many tokens at the beginning are taken from it); none: (itself, 0)"""


def shared_prefixes(table: SlotTable, unfilled: Sequence[int], filled: Sequence[int]) -> list[Wave]:
    """Unfilled slots, each in a wave behind that of the slot from which it takes the beginning of its context; `filled`
    ones have theirs in the cache already. The last token of a context is not counted."""
    wave_of = dict.fromkeys(filled, -1)
    waves: list[Wave] = []
    for slot in sorted(unfilled, key=lambda slot: -int(table.length[slot])):
        other, shared = most_alike(table, slot, np.fromiter(wave_of, np.int64))
        wave_of[slot] = wave_of[other] + 1 if shared else 0
        while len(waves) <= wave_of[slot]:
            waves.append({})
        waves[wave_of[slot]][slot] = (other, shared)
    return waves


def most_alike(table: SlotTable, slot: int, others: np.ndarray) -> tuple[int, int]:
    """(one of `others`, how many tokens a slot's context begins with as that one's): all of them, or enough."""
    stored = int(table.length[slot]) - 1
    enough = min(stored, LEAST_TOKENS)
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
