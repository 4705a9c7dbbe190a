"""Keys and values of the running sequences, kept apart by length so that no short one pays for a long one.

Sequences live in groups of doubling capacity and move up when they outgrow theirs. A group holds its
sequences in dense rows and attends over its own longest one; memory grows with what is occupied.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from april.workers.engines.decoder import DecoderShape

SMALLEST_CAPACITY = 128
LENGTH_STEP = 32
"""Lengths attended over are rounded up to a multiple of this."""


class LengthGroup:
    """Sequences of at most `capacity` tokens, one a row.

    In a decode step it is the span `start:stop` of the batch. Where attention is computed, position p of a row
    is visible iff p <= the row's own position.
    """

    def __init__(self, shape: DecoderShape, capacity: int, max_rows: int, device: torch.device):
        self.shape, self.capacity, self.max_rows = shape, capacity, max_rows
        self.slots: list[int] = []
        self.start = self.stop = 0
        self._reach = torch.arange(capacity, device=device)
        self._keys_values = torch.empty(0, device=device)
        self._rows = self._positions = self._bias = self._reach

    def tensor(self) -> Tensor:
        """[layers, rows, 2 * kv_heads, capacity, head_dim]"""
        return self._keys_values

    def add(self, slot: int) -> int:
        self.slots.append(slot)
        if len(self.slots) > self._keys_values.shape[0 if self._keys_values.dim() == 1 else 1]:
            self._grow()
        return len(self.slots) - 1

    def _grow(self) -> None:
        shape, old = self.shape, self._keys_values
        rows = min(self.max_rows, max(2, 2 * (len(self.slots) - 1)))
        self._keys_values = torch.empty(
            shape.layers, rows, 2 * shape.kv_heads, self.capacity, shape.head_dim,
            dtype=shape.dtype, device=self._reach.device,
        )  # fmt: skip
        # Masked positions are still read: NaN times a weight of zero would be NaN.
        self._keys_values.zero_()
        if old.dim() > 1:
            self._keys_values[:, : old.shape[1]] = old

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Prepare what all layers share; `positions` int64 [rows] of the tokens about to be stored."""
        self._rows, self._positions = self._reach[: len(positions)], positions
        self._length = min(self.capacity, -(-(longest + 1) // LENGTH_STEP) * LENGTH_STEP)
        hidden = self._reach[: self._length] > positions.unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=self.shape.dtype, device=hidden.device)
        self._bias = bias.masked_fill_(hidden, float("-inf"))[:, None, None]

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor, out: Tensor) -> None:
        """Store new keys and values [rows, 2 * kv_heads, head_dim]; write attention's result into `out`."""
        shape, rows = self.shape, len(queries)
        held = self._keys_values[layer]
        held[self._rows, :, self._positions] = keys_values
        seen = held[:rows, :, : self._length]
        # The query heads that share a key head are rows of one small attention: no key is repeated.
        grouped = queries.unflatten(1, (shape.kv_heads, -1))
        attended = F.scaled_dot_product_attention(
            grouped, seen[:, : shape.kv_heads], seen[:, shape.kv_heads :], attn_mask=self._bias
        )
        out.copy_(attended.reshape(out.shape))


class KVCache:
    """Where each slot's keys and values are: a group and a row in it."""

    def __init__(self, shape: DecoderShape, slots: int, max_context: int, device: torch.device):
        capacities = [SMALLEST_CAPACITY]
        while capacities[-1] < max_context:
            capacities.append(2 * capacities[-1])
        capacities[-1] = max_context
        self.groups = [LengthGroup(shape, capacity, slots, device) for capacity in capacities]
        self._capacities = np.array(capacities)
        self._group_of = np.full(slots, -1)
        self._row_of = np.zeros(slots, np.int64)

    def place(self, slot: int, position: int) -> None:
        """Give `slot` a row where `position` can be stored."""
        index = int(np.searchsorted(self._capacities, position, side="right"))
        self._group_of[slot] = index
        self._row_of[slot] = self.groups[index].add(slot)

    def release(self, slot: int, stored: np.ndarray) -> None:
        """Free the slot's row; the group's last sequence moves into it.

        `stored` is int [slots]: positions of each slot that have keys and values.
        """
        group, row = self.groups[self._group_of[slot]], self._row_of[slot]
        last = group.slots.pop()
        if last != slot:
            length = int(stored[last])
            held = group.tensor()[:, :, :, :length]
            held[:, row] = held[:, len(group.slots)]
            group.slots[row], self._row_of[last] = last, row
        self._group_of[slot] = -1

    def clear(self) -> None:
        for group in self.groups:
            group.slots.clear()
        self._group_of.fill(-1)

    def outgrown(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Those of `slots` whose next `positions` lie beyond their group."""
        return slots[positions >= self._capacities[self._group_of[slots]]]

    def promote(self, slot: int, stored: np.ndarray) -> None:
        """Move a sequence that fills its group into the next one."""
        length = int(stored[slot])
        old, row = self.groups[self._group_of[slot]], self._row_of[slot]
        held = old.tensor()[:, row, :, :length].clone()
        self.release(slot, stored)
        self.place(slot, length)
        self.groups[self._group_of[slot]].tensor()[:, self._row_of[slot], :, :length] = held

    def order(self) -> np.ndarray:
        """Slots in the order of the decode batch; sets each group's span of it."""
        start = 0
        for group in self.groups:
            group.start, group.stop = start, start + len(group.slots)
            start = group.stop
        return np.array([slot for group in self.groups for slot in group.slots], np.int64)

    def occupied(self) -> list[LengthGroup]:
        return [group for group in self.groups if group.slots]

    def store(self, slots: np.ndarray, layer: int, keys_values: Tensor) -> None:
        """Store a prefill: [n, length, 2 * kv_heads, head_dim], the rows of `slots`."""
        keys_values = keys_values.transpose(1, 2)
        for index in np.unique(self._group_of[slots]):
            group = self.groups[index]
            inside = self._group_of[slots] == index
            length = min(keys_values.shape[2], group.capacity)
            rows = torch.from_numpy(self._row_of[slots[inside]]).to(keys_values.device)
            chosen = torch.from_numpy(np.flatnonzero(inside)).to(keys_values.device)
            group.tensor()[layer, rows, :, :length] = keys_values[chosen, :, :length]
