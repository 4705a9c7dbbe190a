"""KV cache of the running sequences, grouped by length so that short sequences do not pay for long ones.

Groups have doubling capacities; a sequence moves up when it outgrows its group. A group stores its sequences in dense
rows and attends over the length of its longest one. Memory grows with the occupied rows.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from april.workers.engines.embedded.decoder import Decoder, DecoderShape
from april.workers.engines.embedded.slot_table import DecodeBatch, SlotTable

SMALLEST_CAPACITY = 128
LENGTH_STEP = 16
"""Attention lengths are rounded up to a multiple of this (tokens)."""
START_ALIGNMENT_TOKENS = 32
"""Prefill after a shared prefix starts at a multiple of this, so that contexts with similar prefixes share a batch."""


class LengthGroup:
    """Sequences of at most `capacity` tokens, one per row.

    In a decode step its rows are `start:stop` of the batch, and each row attends to the positions up to its own.
    """

    def __init__(self, shape: DecoderShape, capacity: int, max_rows: int, device: torch.device):
        self.shape, self.capacity, self.max_rows, self.device = shape, capacity, max_rows, device
        self.slots: list[int] = []
        self.start = self.stop = 0
        self.keys_values = self._allocate(0)
        """Keys and values: [layers, 2, rows, kv_heads, capacity, head_dim]."""
        self._length = 0
        """Attention length of the group (tokens): the length of its longest row, rounded up."""
        self._changed = True
        """Whether rows were added, removed or moved since the last step."""

    def _allocate(self, rows: int) -> Tensor:
        # Zeros, because positions out of sight are read too, and NaN times a weight of zero would be NaN.
        shape = self.shape
        size = (shape.layers, 2, rows, shape.kv_heads, self.capacity, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=self.device)

    def add(self, slot: int) -> int:
        """Add a sequence; returns its row."""
        self.slots.append(slot)
        held = self.keys_values.shape[2]
        if len(self.slots) > held:
            grown = self._allocate(min(self.max_rows, max(2, 2 * held)))
            grown[:, :, :held] = self.keys_values
            self.keys_values = grown
        self._changed = True
        return len(self.slots) - 1

    def remove(self, row: int, stored: np.ndarray) -> int | None:
        """Free a row and move the group's last sequence into it. Returns the moved sequence's slot; None if the freed
        row was the last one.

        `stored`: int [slots], number of positions with keys and values in each slot.
        """
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
        """Prepare the index and the mask of a decode step, which all layers share.

        `positions`: int64 [rows], positions of the tokens about to be stored. `longest`: the largest of them.
        """
        length = min(self.capacity, -(-(longest + 1) // LENGTH_STEP) * LENGTH_STEP)
        if self._changed or length != self._length:
            self._changed, self._length = False, length
            self._lay_out(positions)
        self._write_index = (self._row_starts + positions.unsqueeze(1)).view(-1)
        self._bias.view(-1).index_fill_(0, (self._bias_row_starts + positions.unsqueeze(1)).view(-1), 0.0)

    def _lay_out(self, positions: Tensor) -> None:
        """Compute where each row starts in the cache, the attention mask, and views of the cached keys and values;
        steps reuse them until the rows or the attention length change. `positions`: as for `begin_step`."""
        layers, _, held, heads, capacity, head_dim = self.keys_values.shape
        rows, length = len(self.slots), self._length
        row, head = torch.arange(rows, device=self.device).unsqueeze(1), torch.arange(heads, device=self.device)
        keys = (row * heads + head) * capacity
        self._row_starts = torch.cat([keys, keys + held * heads * capacity], dim=1)
        self._bias_row_starts = (row * heads + head) * length
        hidden = torch.arange(length, device=self.device) > positions.unsqueeze(1)
        bias = torch.zeros(hidden.shape, dtype=self.shape.dtype, device=self.device)
        bias.masked_fill_(hidden, float("-inf"))
        self._bias = bias.repeat_interleave(heads, dim=0).unsqueeze(1)
        seen = self.keys_values[:, :, :rows].flatten(2, 3)[:, :, :, :length]
        self._flat = self.keys_values.view(layers, -1, head_dim).unbind()
        self._visible = [(seen[layer, 0], seen[layer, 1]) for layer in range(layers)]

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Store one token's keys and values per row, in the cache of this `layer`, and attend.

        `heads`: [rows, heads + 2 * kv_heads, head_dim], rotated queries, keys and values. Returns [rows, heads *
        head_dim].
        """
        shape, rows = self.shape, len(heads)
        self._flat[layer].index_copy_(0, self._write_index, heads[:, shape.heads :].reshape(-1, shape.head_dim))
        keys, values = self._visible[layer]
        # The query heads that share a key head are rows of one small product: no key is repeated.
        queries = heads[:, : shape.heads].reshape(len(keys), -1, shape.head_dim)
        if queries.dtype == torch.float32:
            scores = torch.baddbmm(self._bias, queries, keys.transpose(1, 2), alpha=shape.head_dim**-0.5)
            attended = torch.bmm(scores.softmax(dim=-1), values)
        else:
            query, key, value, bias = (part.unsqueeze(1) for part in (queries, keys, values, self._bias))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return attended.view(rows, -1)


class CacheRows(NamedTuple):
    """Cache rows of a list of slots, by group."""

    slot_count: int
    """Number of slots in the list."""
    parts: list[tuple[LengthGroup, slice | Tensor, slice | Tensor]]
    """(group, rows in it, indices of these rows' slots in the list) for each group that has some of the slots."""


class KVCache:
    """The KV cache of all slots; maps each slot to a length group and a row in that group."""

    def __init__(self, shape: DecoderShape, slots: int, max_context: int, device: torch.device):
        capacities = [SMALLEST_CAPACITY]
        while capacities[-1] < max_context:
            capacities.append(2 * capacities[-1])
        capacities[-1] = max_context
        self.groups = [LengthGroup(shape, capacity, slots, device) for capacity in capacities]
        self._capacities = np.array(capacities)
        self._group_of = np.full(slots, -1)
        self._row_of = np.zeros(slots, np.int64)

    def allocate(self, slot: int, position: int) -> bool:
        """Assign `slot` a row in the smallest group that can store `position`; there always is one."""
        index = int(np.searchsorted(self._capacities, position, side="right"))
        self._group_of[slot] = index
        self._row_of[slot] = self.groups[index].add(slot)
        return True

    def release(self, slot: int, stored: np.ndarray) -> None:
        """Free the slot's row. `stored`: int [slots], number of positions with keys and values in each slot."""
        group, row = self.groups[self._group_of[slot]], int(self._row_of[slot])
        moved = group.remove(row, stored)
        if moved is not None:
            self._row_of[moved] = row
        self._group_of[slot] = -1

    def copy(self, slot: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a slot's row to the row of slot `to`."""
        source, target = self.groups[self._group_of[slot]], self.groups[self._group_of[to]]
        held = source.keys_values[:, :, self._row_of[slot], :, :length]
        target.keys_values[:, :, self._row_of[to], :, :length] = held

    def zero(self, slot: int) -> None:
        """Zero the slot's row, so that the next sequence there reads no values that are not finite."""
        self.groups[self._group_of[slot]].keys_values[:, :, self._row_of[slot]] = 0

    def clear(self) -> None:
        for group in self.groups:
            group.clear()
        self._group_of.fill(-1)

    def capacities_of(self, slots: np.ndarray) -> np.ndarray:
        """Capacity (tokens) of each slot's group."""
        return self._capacities[self._group_of[slots]]

    def outgrown(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Those of `slots`, int [n], whose group has no room for the position that they store next. `positions`: int64
        [n], that position of each slot."""
        return slots[positions >= self.capacities_of(slots)]

    def promote(self, slot: int, stored: np.ndarray) -> bool:
        """Move a sequence that fills its group into the next one; there always is room, so it returns True. `stored`:
        as for `release`."""
        length = int(stored[slot])
        old, row = self.groups[self._group_of[slot]], self._row_of[slot]
        held = old.keys_values[:, :, row, :, :length].clone()
        self.release(slot, stored)
        self.allocate(slot, length)
        self.groups[self._group_of[slot]].keys_values[:, :, self._row_of[slot], :, :length] = held
        return True

    def batch_order(self) -> np.ndarray:
        """All slots in the order of the decode batch; sets `start` and `stop` of each group."""
        start = 0
        for group in self.groups:
            group.start, group.stop = start, start + len(group.slots)
            start = group.stop
        return np.array([slot for group in self.groups for slot in group.slots], np.int64)

    def rows(self, slots: np.ndarray) -> CacheRows:
        """The cache rows of the given slots, by length group."""
        parts = []
        for index in sorted(set(self._group_of[slots].tolist())):
            inside, group = np.flatnonzero(self._group_of[slots] == index), self.groups[index]
            index_pair = [indices(values, group.device) for values in (self._row_of[slots[inside]], inside)]
            parts.append((group, *index_pair))
        return CacheRows(len(slots), parts)

    def store(self, rows: CacheRows, layer: int, keys_values: Tensor, start: int = 0) -> None:
        """Store the keys and values of a prefill of these rows in one layer, from position `start` on. `keys_values`:
        [n, length, 2 * kv_heads, head_dim]."""
        keys_values = keys_values.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
        for group, held, chosen in rows.parts:
            stop = min(start + keys_values.shape[3], group.capacity)
            group.keys_values[layer][:, held, :, start:stop] = keys_values[:, chosen, :, : stop - start]

    def read(self, rows: CacheRows, layer: int, length: int) -> Tensor:
        """Keys and values of a layer at the first `length` positions of these rows: [n, length, 2 * kv_heads,
        head_dim], as in a prefill."""
        _, _, _, heads, _, head_dim = self.groups[0].keys_values.shape
        read = self.groups[0].keys_values.new_empty(2, rows.slot_count, heads, length, head_dim)
        for group, held, chosen in rows.parts:
            read[:, chosen] = group.keys_values[layer][:, held, :, :length]
        return read.permute(1, 3, 0, 2, 4).flatten(2, 3)

    # --- forward passes --------------------------------------------------------------------------------------------

    def prefill(self, decoder: Decoder, table: SlotTable, shared: Mapping[int, int], pass_tokens: int) -> None:
        """Prefill the contexts of the slots that `shared` names. The last token of each context is left out, since it
        is decoded. A pass prefills at most `pass_tokens` tokens with padding, unless a single context is longer.

        `shared`: slot -> number of its leading tokens whose keys and values are in the cache already.
        """
        for slots, start in prefill_batches(table, shared, pass_tokens):
            longest = int(table.length[slots].max()) - 1
            tokens = torch.from_numpy(table.tokens[slots, start:longest].astype(np.int64)).to(decoder.device)
            rows = self.rows(slots)
            prefix = partial(self.read, rows, length=start) if start else None
            for layer, keys_values in enumerate(decoder.prefill(tokens, start, prefix)):
                self.store(rows, layer, keys_values, start)

    def decode(self, decoder: Decoder, batch: DecodeBatch) -> Tensor:
        """Logits, float32 [n, vocabulary], of the next token of each row of the batch. Stores keys and values of the
        rows' last tokens."""
        groups = [group for group in self.groups if group.slots]
        for group in groups:
            rows = slice(group.start, group.stop)
            group.begin_step(batch.positions[rows], int(batch.lengths[rows].max()) - 1)
        return decoder.decode(batch.last, batch.positions, groups)


def prefill_batches(table: SlotTable, shared: Mapping[int, int], pass_tokens: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (slots, start position) of each prefill batch: slots of similar length, with at most `pass_tokens` tokens
    and padding in all, unless one slot alone has more. `shared`: slot -> number of its leading tokens that are in the
    cache already."""
    batch: list[int] = []
    batch_start = 0
    stored = {slot: int(table.length[slot]) - 1 for slot in shared}
    rest = [(shared[slot] // START_ALIGNMENT_TOKENS * START_ALIGNMENT_TOKENS, stored[slot], slot) for slot in shared]
    for start, stop, slot in sorted(rest):
        if stop == shared[slot]:
            continue
        if batch and (start != batch_start or (len(batch) + 1) * (stop - start) > pass_tokens):
            yield np.array(batch), batch_start
            batch = []
        batch_start = start
        batch.append(slot)
    if batch:
        yield np.array(batch), batch_start


def indices(values: np.ndarray, device: torch.device) -> slice | Tensor:
    """`values`, int64 [n], as a slice if they are consecutive, which copies faster, otherwise as a tensor."""
    first, count = int(values[0]), len(values)
    if (values == np.arange(first, first + count)).all():
        return slice(first, first + count)
    return torch.from_numpy(values).to(device)
