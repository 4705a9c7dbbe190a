"""Keys and values of the running sequences, kept apart by length so that no short one pays for a long one.

Sequences live in groups of doubling capacity and move up when they outgrow theirs. A group holds its
sequences in dense rows and attends over its own longest one; memory grows with what is occupied.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from april.workers.engines.embedded.decoder import DecoderShape

SMALLEST_CAPACITY = 128
LENGTH_STEP = 16
"""Lengths attended over are rounded up to a multiple of this."""


class LengthGroup:
    """Sequences of at most `capacity` tokens, one a row.

    In a decode step it is the span `start:stop` of the batch, and a row sees the positions up to its own.
    """

    def __init__(self, shape: DecoderShape, capacity: int, max_rows: int, device: torch.device):
        self.shape, self.capacity, self.max_rows, self.device = shape, capacity, max_rows, device
        self.slots: list[int] = []
        self.start = self.stop = 0
        self.keys_values = self._allocate(0)
        """[layers, 2, rows, kv_heads, capacity, head_dim]"""
        self._length = 0
        """positions attended over, those of the longest row rounded up"""
        self._changed = True
        """whether rows came, went or moved since the last step"""

    def _allocate(self, rows: int) -> Tensor:
        # Zeros, because positions out of sight are read too, and NaN times a weight of zero would be NaN.
        shape = self.shape
        size = (shape.layers, 2, rows, shape.kv_heads, self.capacity, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=self.device)

    def add(self, slot: int) -> int:
        """Returns the row of the new sequence."""
        self.slots.append(slot)
        held = self.keys_values.shape[2]
        if len(self.slots) > held:
            grown = self._allocate(min(self.max_rows, max(2, 2 * held)))
            grown[:, :, :held] = self.keys_values
            self.keys_values = grown
        self._changed = True
        return len(self.slots) - 1

    def remove(self, row: int, stored: np.ndarray) -> int | None:
        """Free a row; the last sequence moves into it. Returns that one's slot, if it moved."""
        last = self.slots.pop()
        self._changed = True
        if row == len(self.slots):
            return None
        held = self.keys_values[:, :, :, :, : int(stored[last])]
        held[:, :, row] = held[:, :, len(self.slots)]
        self.slots[row] = last
        return last

    def clear(self) -> None:
        self.slots.clear()
        self._changed = True

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Prepare what all layers share; `positions` int64 [rows] of the tokens about to be stored."""
        length = min(self.capacity, -(-(longest + 1) // LENGTH_STEP) * LENGTH_STEP)
        if self._changed or length != self._length:
            self._changed, self._length = False, length
            self._lay_out(positions)
        self._places = (self._first_places + positions.unsqueeze(1)).view(-1)
        self._bias.view(-1).index_fill_(0, (self._first_bias + positions.unsqueeze(1)).view(-1), 0.0)

    def _lay_out(self, positions: Tensor) -> None:
        """What stays the same while the rows and the length do."""
        layers, _, held, heads, capacity, head_dim = self.keys_values.shape
        rows, length = len(self.slots), self._length
        row, head = torch.arange(rows, device=self.device).unsqueeze(1), torch.arange(heads, device=self.device)
        keys = (row * heads + head) * capacity
        self._first_places = torch.cat([keys, keys + held * heads * capacity], dim=1)
        self._first_bias = (row * heads + head) * length
        hidden = torch.arange(length, device=self.device) > positions.unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=self.shape.dtype, device=self.device)
        bias.masked_fill_(hidden, float("-inf"))
        self._bias = bias.repeat_interleave(heads, dim=0).unsqueeze(1)
        seen = self.keys_values[:, :, :rows].flatten(2, 3)[:, :, :, :length]
        self._flat = self.keys_values.view(layers, -1, head_dim).unbind()
        self._seen = [(seen[layer, 0], seen[layer, 1]) for layer in range(layers)]

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Attention [rows, heads * head_dim] of rotated [rows, heads + 2 * kv_heads, head_dim], which it stores."""
        shape, rows = self.shape, len(heads)
        self._flat[layer].index_copy_(0, self._places, heads[:, shape.heads :].reshape(-1, shape.head_dim))
        keys, values = self._seen[layer]
        # The query heads that share a key head are rows of one small product: no key is repeated.
        queries = heads[:, : shape.heads].reshape(len(keys), -1, shape.head_dim)
        if queries.dtype == torch.float32:
            scores = torch.baddbmm(self._bias, queries, keys.transpose(1, 2), alpha=shape.head_dim**-0.5)
            attended = torch.bmm(scores.softmax(dim=-1), values)
        else:
            query, key, value, bias = (part.unsqueeze(1) for part in (queries, keys, values, self._bias))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return attended.view(rows, -1)


class Rows(NamedTuple):
    """Where a number of slots are."""

    number: int
    parts: list[tuple[LengthGroup, slice | Tensor, slice | Tensor]]
    """each group of some of them, these ones' rows in it, and which of the slots they are"""


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
        """Free the slot's row. `stored` is int [slots]: positions of each slot that have keys and values."""
        group, row = self.groups[self._group_of[slot]], int(self._row_of[slot])
        moved = group.remove(row, stored)
        if moved is not None:
            self._row_of[moved] = row
        self._group_of[slot] = -1

    def copy(self, slot: int, to: int, length: int) -> None:
        """The first `length` positions of a slot's row into that of another."""
        source, target = self.groups[self._group_of[slot]], self.groups[self._group_of[to]]
        held = source.keys_values[:, :, self._row_of[slot], :, :length]
        target.keys_values[:, :, self._row_of[to], :, :length] = held

    def wipe(self, slot: int) -> None:
        """Make the slot's row zeros again, so that the next one there does not read what is not finite."""
        self.groups[self._group_of[slot]].keys_values[:, :, self._row_of[slot]] = 0

    def clear(self) -> None:
        for group in self.groups:
            group.clear()
        self._group_of.fill(-1)

    def capacities_of(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that each slot's group can hold."""
        return self._capacities[self._group_of[slots]]

    def outgrown(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Those of `slots` whose next `positions` lie beyond their group."""
        return slots[positions >= self.capacities_of(slots)]

    def promote(self, slot: int, stored: np.ndarray) -> None:
        """Move a sequence that fills its group into the next one."""
        length = int(stored[slot])
        old, row = self.groups[self._group_of[slot]], self._row_of[slot]
        held = old.keys_values[:, :, row, :, :length].clone()
        self.release(slot, stored)
        self.place(slot, length)
        self.groups[self._group_of[slot]].keys_values[:, :, self._row_of[slot], :, :length] = held

    def order(self) -> np.ndarray:
        """Slots in the order of the decode batch; sets each group's span of it."""
        start = 0
        for group in self.groups:
            group.start, group.stop = start, start + len(group.slots)
            start = group.stop
        return np.array([slot for group in self.groups for slot in group.slots], np.int64)

    def occupied(self) -> list[LengthGroup]:
        return [group for group in self.groups if group.slots]

    def rows(self, slots: np.ndarray) -> Rows:
        """Where these slots are."""
        parts = []
        for index in np.unique(self._group_of[slots]):
            inside, group = np.flatnonzero(self._group_of[slots] == index), self.groups[index]
            places = [indices(one, group.device) for one in (self._row_of[slots[inside]], inside)]
            parts.append((group, *places))
        return Rows(len(slots), parts)

    def store(self, rows: Rows, layer: int, keys_values: Tensor, start: int = 0) -> None:
        """Store a prefill of these rows: [n, length, 2 * kv_heads, head_dim], from position `start` on."""
        keys_values = keys_values.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
        for group, held, chosen in rows.parts:
            stop = min(start + keys_values.shape[3], group.capacity)
            group.keys_values[layer][:, held, :, start:stop] = keys_values[:, chosen, :, : stop - start]

    def read(self, rows: Rows, layer: int, length: int) -> Tensor:
        """The first positions of these rows, in the form of a prefill: [n, length, 2 * kv_heads, head_dim]."""
        _, _, _, heads, _, head_dim = self.groups[0].keys_values.shape
        read = self.groups[0].keys_values.new_empty(2, rows.number, heads, length, head_dim)
        for group, held, chosen in rows.parts:
            read[:, chosen] = group.keys_values[layer][:, held, :, :length]
        return read.permute(1, 3, 0, 2, 4).flatten(2, 3)


def indices(places: np.ndarray, device: torch.device) -> slice | Tensor:
    """Of int64 [n]; a slice where they lie behind each other, which is copied at once."""
    first, count = int(places[0]), len(places)
    if (places == np.arange(first, first + count)).all():
        return slice(first, first + count)
    return torch.from_numpy(places).to(device)
