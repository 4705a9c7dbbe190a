"""KV cache for GPUs with flash attention: each slot has an extent of one flat run of tokens, and decode steps are CUDA
graphs.

One kernel attends for all slots of whatever lengths, and reads only the positions that they have; a prefill after a
cached prefix and a decode step differ only in the number of queries. Reference for the layout: the variable-length
interface of FlashAttention-2 (arXiv 2307.08691).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from april.workers.engines.base import EngineError
from april.workers.engines.embedded.decoder import Decoder, DecoderShape
from april.workers.engines.embedded.slot_table import DecodeBatch, SlotTable

SMALLEST_EXTENT = 128
"""Size of the smallest extent (a slot's range of cache positions), tokens. Other extents are twice, four times ... as
large, up to the longest context."""
SCRATCH = SMALLEST_EXTENT
"""Number of cache positions at the front that belong to no slot; the padding rows of a graph write there."""
FIRST_TOKENS = 1 << 15
"""Size with which the cache begins (tokens); it doubles when it is full."""
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes (rows) for which CUDA graphs of a decode step are captured; larger ones are multiples of the last."""
FLASH_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability (major, minor) with flash attention."""
FLASH_TYPES = (torch.bfloat16, torch.float16)
LARGEST_FLASH_HEAD = 256
ROWS_TO_FILL_A_GPU = 24
"""Rows of a decode step that keep a GPU busy without splitting each row's keys (on an H200, 32 do and 8 do not)."""
RESERVE_BYTES = 1 << 30
"""Bytes of memory that the cache leaves free for activations, a layer's new weights, and fragmentation."""
SAMPLING_COPIES = 8
"""Copies of a step's float32 logits that sampling makes at its peak."""


def runs_flash(device: torch.device, shape: DecoderShape) -> bool:
    """Whether torch's flash attention computes this model on this device."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
        and shape.dtype in FLASH_TYPES
        and shape.head_dim % 8 == 0
        and shape.head_dim <= LARGEST_FLASH_HEAD
    )


# --- extents ----------------------------------------------------------------------------------------------------------


class Extents:
    """Allocates ranges of [0, size), first fit; adjacent free ranges are merged."""

    def __init__(self, size: int):
        self.size = size
        self._free = [(0, size)] if size else []
        """(start, length) of each free range, in order."""

    def take(self, length: int) -> int | None:
        """Start of a new range of `length` positions, which is then in use; None if no free range is as long."""
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[index : index + 1] = [(start + length, free - length)] if free > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Free the range of `length` positions from `start` on."""
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, length)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self._free = merged

    def grow(self, size: int) -> None:
        self.give(self.size, size - self.size)
        self.size = size


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of queries; each row belongs to a slot and attends to its extent (range of cache positions). It is passed to
    the decoder as `rows` of `Decoder.fill`, or as a group of `Decoder.decode`."""

    shape: DecoderShape
    keys_values: list[Tensor]
    """Keys and values of each layer: [tokens, 2 * kv_heads, head_dim]."""
    write_index: Tensor
    """Cache positions, int64 [T], where the keys and values of each new token are stored."""
    query_starts: Tensor
    """Cumulative number of queries, int32 [rows + 1]."""
    extent_starts: Tensor
    """Start of each row's extent, int32 [rows + 1]; the last entry is not read."""
    used: Tensor
    """Number of cached positions of each row, the new ones included, int32 [rows]."""
    most_queries: int
    most_keys: int

    start = 0

    @property
    def stop(self) -> int:
        return len(self.write_index)

    @cached_property
    def shared_starts(self) -> Tensor:
        """`query_starts` for a call in which the query heads that share a key head count as further queries of one
        head: the cumulative number of these queries, int32 [rows + 1]."""
        return self.query_starts * (self.shape.heads // self.shape.kv_heads)

    def store(self, layer: int, heads: Tensor) -> None:
        self.keys_values[layer].index_copy_(0, self.write_index, heads)

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        queries = heads[:, : self.shape.heads]
        self.store(layer, heads[:, self.shape.heads :])
        keys, values = self.keys_values[layer].chunk(2, dim=1)
        attended = attend_flash if heads.is_cuda else attend_each
        return attended(queries, keys, values, self).reshape(len(heads), -1)


def attend_flash(queries: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Attention of all rows in one call of FlashAttention. `queries`: [T, heads, head_dim]; `keys`, `values`: [tokens,
    kv_heads, head_dim]. Returns [T, heads, head_dim].

    In a decode step, the query heads that share a key head read its keys only once. With many rows, this function
    passes these query heads to the kernel as queries of one head. With few rows the kernel shares the keys by itself,
    and splits them among multiprocessors.
    """
    causal, starts, most = rows.most_queries > 1, rows.query_starts, rows.most_queries
    shape, sharing = queries.shape, queries.shape[1] // keys.shape[1]
    together = not causal and sharing > 1 and shape[0] >= ROWS_TO_FILL_A_GPU
    if together:
        queries = queries.unflatten(1, (-1, sharing)).transpose(1, 2).flatten(0, 1)
        starts, most = rows.shared_starts, sharing
    attended = torch.ops.aten._flash_attention_forward(
        queries, keys, values, starts, rows.extent_starts, most, rows.most_keys,
        0.0, causal, False, window_size_left=-1, window_size_right=0 if causal else -1, seqused_k=rows.used,
    )[0]  # fmt: skip
    return attended.unflatten(0, (-1, sharing)).transpose(1, 2).reshape(shape) if together else attended


def attend_each(queries: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """As `attend_flash`, row by row, on any device."""
    bounds, parts = rows.query_starts.tolist(), []
    for row, (first, stop) in enumerate(pairwise(bounds)):
        begin, used = int(rows.extent_starts[row]), int(rows.used[row])
        visible = torch.ones(stop - first, used, dtype=torch.bool, device=queries.device).tril(used - (stop - first))
        query, key, value = (
            part.transpose(0, 1)[None]
            for part in (queries[first:stop], keys[begin : begin + used], values[begin : begin + used])
        )
        attended = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


# --- cache ------------------------------------------------------------------------------------------------------------


class FlatCache:
    """The KV cache of all slots. It grows as far as the device's memory allows; then a slot may get no extent."""

    def __init__(self, shape: DecoderShape, slots: int, max_context: int, device: torch.device):
        self.shape, self.max_context, self.device, self.slots = shape, max_context, device, slots
        self._keys_values: list[Tensor] = []
        self._extents = Extents(0)
        self._most_tokens = 0
        """Largest size of the cache (tokens); 0 until the first slot is allocated, when the weights are in memory."""
        self._start_of = np.full(slots, -1)
        self._capacity_of = np.zeros(slots, np.int64)
        rows = graph_rows(slots)
        self._tokens, self._positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._entered: DecodeBatch | None = None
        """The batch whose rows' extent starts are in `_starts`; None before the first decode step."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Captured CUDA graph of a decode step, by the number of rows that it computes."""
        self._logits = torch.empty(0, shape.vocabulary, dtype=torch.float32, device=device)
        """Logits that CUDA graphs compute: float32 [rows, vocabulary], allocated with the cache."""
        self._decoder: Decoder | None = None
        """The decoder that the graphs run."""

    # --- extents ---------------------------------------------------------------------------------------------------

    def allocate(self, slot: int, position: int) -> bool:
        """Give `slot` an extent that can store `position`. Returns whether the cache had room."""
        extent = self._take(position)
        if extent is None:
            return False
        self._start_of[slot], self._capacity_of[slot] = extent
        return True

    def _take(self, position: int) -> tuple[int, int] | None:
        """(start, length) of a new extent that can store `position`; other extents may move for it. None without
        room."""
        capacity = SMALLEST_EXTENT
        while capacity <= position:
            capacity *= 2
        capacity = min(capacity, self.max_context)
        start = self._extents.take(capacity)
        while start is None and self._grow(capacity):
            start = self._extents.take(capacity)
        return None if start is None else (start, capacity)

    def release(self, slot: int, stored: np.ndarray) -> None:
        """Free the slot's extent, its range of cache positions. `stored` is not read; it is a parameter because
        `KVCache.release` has the same interface and needs it."""
        self._extents.give(int(self._start_of[slot]), int(self._capacity_of[slot]))
        self._start_of[slot] = -1

    def clear(self) -> None:
        self._start_of.fill(-1)
        self._free_from(SCRATCH)

    def copy(self, slot: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a slot to slot `to`."""
        source, target = int(self._start_of[slot]), int(self._start_of[to])
        for layer in self._keys_values:
            layer[target : target + length] = layer[source : source + length]

    def zero(self, slot: int) -> None:
        start = int(self._start_of[slot])
        for layer in self._keys_values:
            layer[start : start + int(self._capacity_of[slot])] = 0

    def capacities_of(self, slots: np.ndarray) -> np.ndarray:
        """Capacity (tokens) of each slot's extent, its range of cache positions; `slots`, int [n], have one."""
        return self._capacity_of[slots]

    def outgrown(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Those of `slots`, int [n], that have an extent too short for the position that they store next. `positions`:
        int64 [n], that position of each slot."""
        return slots[(self._start_of[slots] >= 0) & (positions >= self._capacity_of[slots])]

    def promote(self, slot: int, stored: np.ndarray) -> bool:
        """Move a sequence that fills its extent into a larger one. Returns whether the cache had room. `stored`: int
        [slots], number of positions with keys and values in each slot."""
        length = int(stored[slot])
        extent = self._take(length)
        if extent is None:
            return False
        (target, _), start = extent, int(self._start_of[slot])
        for layer in self._keys_values:
            layer[target : target + length] = layer[start : start + length]
        self.release(slot, stored)
        self._start_of[slot], self._capacity_of[slot] = extent
        return True

    def batch_order(self) -> np.ndarray:
        """int64 [n]: the slots that have an extent (a range of the cache), ascending. This is the order of the rows in
        a decode batch."""
        return np.flatnonzero(self._start_of >= 0)

    def _grow(self, needed: int) -> bool:
        """Make room for an extent of `needed` tokens by enlarging the cache or, at its largest, by moving extents
        together. Returns whether anything has changed."""
        if not self._most_tokens:
            self._most_tokens = self._room()
        size = self._extents.size
        larger = min(self._most_tokens, max(2 * size, size + needed, SCRATCH + FIRST_TOKENS))
        if larger <= size:
            return self._compact()
        self._graphs.clear()  # they hold the old addresses
        for layer in range(self.shape.layers):
            grown = torch.zeros(
                larger, 2 * self.shape.kv_heads, self.shape.head_dim, dtype=self.shape.dtype, device=self.device
            )
            if size:
                grown[:size] = self._keys_values[layer]
                self._keys_values[layer] = grown
            else:
                self._keys_values.append(grown)
        self._extents.grow(larger)
        if not size:
            self._extents.take(SCRATCH)
            self._logits = self._logits.new_empty(graph_rows(self.slots), self.shape.vocabulary)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the old, smaller tensors fit no later request
        return True

    def _room(self) -> int:
        """Number of tokens for which the cache should have room: what all slots need for contexts of the maximum
        length, or what the free memory holds if that is less. Raises EngineError if it does not hold one such
        context."""
        # Extents of different sizes leave gaps until they are moved together.
        wanted = SCRATCH + self.slots * self.max_context
        if self.device.type != "cuda":
            return wanted
        free = torch.cuda.mem_get_info(self.device)[0]
        total = torch.cuda.get_device_properties(self.device).total_memory
        allowed = total * torch.cuda.get_per_process_memory_fraction(self.device)
        free = min(free, allowed - torch.cuda.memory_reserved(self.device))
        free -= RESERVE_BYTES + SAMPLING_COPIES * self.slots * self.shape.vocabulary * 4
        token_bytes = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * self.shape.dtype.itemsize
        # While the cache grows, one layer exists twice.
        held = int(free / token_bytes * self.shape.layers / (self.shape.layers + 1))
        if held < SCRATCH + self.max_context:
            raise EngineError(
                f"{max(0, free) / 2**30:.1f} GiB are free for the KV cache, which holds {max(0, held)} tokens; one "
                f"context takes {self.max_context}: shorten sampling.max_response_tokens, lower worker.slots, or give "
                "the engine more memory"
            )
        return min(wanted, held)

    def _compact(self) -> bool:
        """Move all extents to the front. Returns whether one has moved."""
        front, moved = SCRATCH, False
        for slot in sorted(self.batch_order(), key=lambda slot: self._start_of[slot]):
            start, capacity = int(self._start_of[slot]), int(self._capacity_of[slot])
            if start != front:
                moved = True
                for layer in self._keys_values:
                    layer[front : front + capacity] = layer[start : start + capacity].clone()
                self._start_of[slot] = front
            front += capacity
        if moved:
            self._free_from(front)
            self._entered = None
        return moved

    def _free_from(self, front: int) -> None:
        """Make all cache positions from `front` on a single free range, and those before it a single used one."""
        self._extents = Extents(self._extents.size)
        self._extents.take(front)

    # --- forward passes --------------------------------------------------------------------------------------------

    def prefill(self, decoder: Decoder, table: SlotTable, shared: Mapping[int, int], pass_tokens: int) -> None:
        """Prefill the contexts of the slots that `shared` names. The last token of each context is left out, since it
        is decoded. A pass prefills at most `pass_tokens` tokens, unless a single context is longer.

        `shared`: slot -> number of its leading tokens whose keys and values are in the cache already.
        """
        batch: list[int] = []
        tokens = 0
        for slot, begin in shared.items():
            new = int(table.length[slot]) - 1 - begin
            if batch and tokens + new > pass_tokens:
                self._prefill_batch(decoder, table, batch, shared)
                batch, tokens = [], 0
            if new:
                batch.append(slot)
                tokens += new
        if batch:
            self._prefill_batch(decoder, table, batch, shared)

    def _prefill_batch(self, decoder: Decoder, table: SlotTable, slots: list[int], shared: Mapping[int, int]) -> None:
        spans = [(slot, shared[slot], int(table.length[slot]) - 1) for slot in slots]
        tokens = np.concatenate([table.tokens[slot, begin:end] for slot, begin, end in spans]).astype(np.int64)
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
        counts = np.array([end - begin for _, begin, end in spans])
        starts, used = self._start_of[slots], np.array([end for *_, end in spans])
        rows = Rows(
            self.shape,
            self._keys_values,
            self._tensor(positions + np.repeat(starts, counts), np.int64),
            self._tensor(np.concatenate([[0], counts.cumsum()]), np.int32),
            self._tensor(np.concatenate([starts, [0]]), np.int32),
            self._tensor(used, np.int32),
            int(counts.max()),
            int(used.max()),
        )
        decoder.fill(self._tensor(tokens, np.int64), self._tensor(positions, np.int64), rows)

    def decode(self, decoder: Decoder, batch: DecodeBatch) -> Tensor:
        """Logits, float32 [n, vocabulary], of the next token of each row of the batch. Stores keys and values of the
        rows' last tokens."""
        count = len(batch.slots)
        size = graph_rows(count)
        if decoder is not self._decoder:
            self._graphs.clear()
            self._decoder = decoder
        if batch is not self._entered:
            self._entered = batch
            self._starts.zero_()
            self._starts[:count] = self._tensor(self._start_of[batch.slots], np.int32)
            self._positions.zero_()
        self._tokens[:count] = batch.last
        self._positions[:count] = batch.positions
        if self.device.type != "cuda":
            self._step(decoder, size)
        else:
            if size not in self._graphs:
                pool = next((graph.pool() for graph in self._graphs.values()), None)
                self._graphs[size] = capture(partial(self._step, decoder, size), pool)
            self._graphs[size].replay()
        return self._logits[:count]

    def _step(self, decoder: Decoder, size: int) -> None:
        positions = self._positions[:size]
        rows = Rows(
            self.shape, self._keys_values, self._starts[:size] + positions, self._query_starts[: size + 1],
            self._starts[: size + 1], (positions + 1).int(), 1, self.max_context,
        )  # fmt: skip
        self._logits[:size] = decoder.decode(self._tokens[:size], positions, [rows])

    def _tensor(self, values: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(self.device)


def graph_rows(count: int) -> int:
    """Smallest batch size (rows) of a CUDA graph that `count` rows fit into."""
    last = GRAPH_ROWS[-1]
    return next((rows for rows in GRAPH_ROWS if rows >= count), -(-count // last) * last)


def capture(step: Callable[[], None], pool: tuple[int, int] | None) -> torch.cuda.CUDAGraph:
    """Capture the work that `step` launches as a CUDA graph, after one call that initialises its libraries. `pool`: id
    of the memory pool of another graph, which must never run at the same time; None for memory of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Another thread may lock memory for new weights meanwhile, which concerns no capture but in the default mode.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph
