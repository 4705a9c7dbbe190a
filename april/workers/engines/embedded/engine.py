"""The embedded engine: continuous batching of a small decoder in plain PyTorch, on any device.

A request holds a slot from its first token to its last; a freed slot is refilled in the next step, or in the one after
it where steps run ahead. The sampled tokens of a slot that were not returned yet are always of the current version.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from april.wire.message import Version
from april.workers.engines import ENGINES
from april.workers.engines.base import Chunk, EngineError, Finish, Request, Ticks
from april.workers.engines.embedded.decoder import Decoder, make_rotations, read_shape
from april.workers.engines.embedded.flat_cache import FlatCache, runs_flash
from april.workers.engines.embedded.kv_cache import KVCache
from april.workers.engines.embedded.sampling import sample, uniforms
from april.workers.engines.embedded.slot_table import (
    DecodeBatch,
    DecodeStep,
    SlotTable,
    Wave,
    shared_prefixes,
    to_device,
)
from april.workers.engines.entry import check_request

CPU_PREFILL_TOKENS = 512
"""Maximum number of padded tokens in one prefill on a CPU, so that activations stay in the core's cache."""


class TorchEngine:
    """Implements `Engine`. Reads the structure from the folder's config.json; weights come only from `load_weights`."""

    ready = True

    def __init__(
        self,
        model_path: str | Path,
        slots: int = 64,
        max_context: int | None = None,
        device: str = "cpu",
        chunk_tokens: int = 512,
        report_s: float = 2.0,
        prefill_tokens: int = 4096,
        keep_cache: bool = False,
        flat: bool | None = None,
    ):
        """`max_context`: most tokens of prompt and response; None for the model's maximum. `chunk_tokens`, `report_s`:
        a sequence's tokens are returned as a chunk once there are `chunk_tokens` of them, and those of all sequences
        every `report_s` seconds. `prefill_tokens`: most padded tokens in one prefill (fewer on a CPU), and most context
        tokens admitted in one step. `keep_cache`: keep the KV cache when weights change, to measure the cost of
        recomputing contexts. `flat`: whether the cache is a `FlatCache`, and decode steps run ahead of the host; None:
        if the device runs flash attention."""
        self.shape = read_shape(model_path, torch.float32 if torch.device(device).type == "cpu" else None)
        self.max_context = max_context or self.shape.max_positions
        if self.max_context > self.shape.max_positions:
            raise EngineError(
                f"max_context = {max_context} exceeds the model's {self.shape.max_positions} positions; lower it"
            )
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:  # some of torch's calls ask for an index
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.slots, self.generated_tokens = slots, 0
        self.version: Version | None = None
        self.chunk_tokens, self.prefill_tokens = chunk_tokens, prefill_tokens
        self._pass_tokens = min(prefill_tokens, CPU_PREFILL_TOKENS) if self.device.type == "cpu" else prefill_tokens
        self._ticks = Ticks(report_s, time.monotonic())
        self.keep_cache = keep_cache
        self._decoder: Decoder | None = None
        self._rotations = make_rotations(self.shape, self.max_context, self.device)
        self._flat = runs_flash(self.device, self.shape) if flat is None else flat
        self._cache = self._new_cache()
        self._table = SlotTable(slots, self.max_context)
        self._queue: dict[int, Request] = {}
        self._slot_of: dict[int, int] = {}
        self._free = list(reversed(range(slots)))
        self._awaiting_prefill: list[int] = []
        """Running slots whose context is not in the KV cache."""
        self._cache_full = False
        """Whether some of the running slots wait for room in the KV cache. No further request is admitted before these
        have it."""
        self._pre_swap_chunks: list[Chunk] = []
        """Chunks of tokens that were sampled under the former weights and not returned before the weights changed; the
        next step returns them."""
        self._failures: list[tuple[int, str]] = []
        self._batch: DecodeBatch | None = None
        """Arrays of the running slots. None if they have to be rebuilt, because a slot was added, removed or
        changed."""
        self._ahead: DecodeStep | None = None
        """A decode step that was launched on the device and whose tokens are not read yet. Until they are, no slot is
        filled or prefilled. The step is dropped when weights change: its tokens are sampled again."""

    @property
    def live(self) -> int:
        return len(self._queue) + len(self._slot_of)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def capacity(self) -> int:
        return self.slots

    @property
    def kv_tokens(self) -> int:
        return self.slots * self.max_context

    def submit(self, request: Request) -> None:
        live = self._queue.keys() | self._slot_of.keys()
        check_request(request, self.shape.vocabulary, self.max_context, live)
        if request.min_p or request.with_support:
            raise EngineError(
                f"request {request.id} has min_p = {request.min_p} and with_support = {request.with_support}, which "
                f"the embedded engine cannot do; use {ENGINES.names_where(lambda engine: engine.returns_supports)}"
            )
        self._queue[request.id] = request

    def load_weights(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        with torch.inference_mode():
            if self._decoder is None:
                self._decoder = Decoder(self.shape, tensors, self._rotations)
            else:
                self._decoder.refill(tensors)
        for slot in self._slot_of.values():
            self._pre_swap_chunks += self._take_chunk(slot)
        self.version, self._batch = version, None
        self._ahead = None
        if not self.keep_cache:
            self._cache.clear()
            self._awaiting_prefill = list(self._slot_of.values())

    @torch.inference_mode()
    def score(self, tokens: np.ndarray) -> np.ndarray:
        if self._decoder is None:
            raise EngineError("there are no weights to score with; load some")
        return self._decoder.score(torch.from_numpy(tokens.astype(np.int64)).to(self.device)).cpu().numpy()

    @torch.inference_mode()
    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors that the engine holds with other values than `tensors` (implements
        `ComparingEngine`)."""
        return list(self._decoder.differing(tensors)) if self._decoder else []

    @property
    def dtype(self) -> str:
        return str(self.shape.dtype).removeprefix("torch.")

    def discard_weights(self) -> None:
        self._decoder = self._batch = self._ahead = self.version = None

    def release(self) -> None:
        """Implements `TimeSharingEngine`: drop weights and KV cache, and return their memory to the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step may be running ahead
        self.discard_weights()
        self._cache = self._new_cache()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Implements `TimeSharingEngine`. Allocates nothing yet: the weights come with the next load, and the KV cache
        grows as contexts fill it."""

    def _new_cache(self) -> FlatCache | KVCache:
        kind = FlatCache if self._flat else KVCache
        return kind(self.shape, self.slots, self.max_context, self.device)

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        if self._decoder is None:
            return []
        chunks, self._pre_swap_chunks = self._pre_swap_chunks, []
        step, self._ahead = self._ahead or self._begin_step(self._decoder), None
        if step is None:
            return chunks
        admits = self._queue and self._free and not self._cache_full
        if self._flat and self._batch is step.batch and step.batch.steps_left and not admits:
            self._ahead = self._launch(self._decoder, step.batch)
        return chunks + self._finish_step(step)

    def _begin_step(self, decoder: Decoder) -> DecodeStep | None:
        """Admit and prefill requests while there is room, then launch a decode step of the running slots and return it;
        None if no slot runs."""
        self._admit()
        if self._awaiting_prefill:
            self._prefill(decoder)
        if not self._slot_of:
            return None
        self._batch = self._batch or self._new_batch()
        return self._launch(decoder, self._batch) if self._batch else None

    @torch.inference_mode()
    def cancel(self, request_id: int) -> list[Chunk]:
        if self._queue.pop(request_id, None) is not None or request_id not in self._slot_of:
            return []
        slot = self._slot_of[request_id]
        chunks = [chunk for chunk in self._pre_swap_chunks if chunk.id == request_id]
        self._pre_swap_chunks = [chunk for chunk in self._pre_swap_chunks if chunk.id != request_id]
        chunks += self._take_chunk(slot)
        self._free_slot(slot)
        return chunks

    def cancel_all(self, request_ids: Iterable[int]) -> list[Chunk]:
        return [chunk for request_id in request_ids for chunk in self.cancel(request_id)]

    def failures(self) -> list[tuple[int, str]]:
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        self._queue.clear()
        self._slot_of.clear()
        self._pre_swap_chunks.clear()
        self._decoder = self._batch = self._ahead = None
        vars(self).pop("_cache", None)

    def _admit(self) -> None:
        """Move queued requests into free slots, first come first served: in one step requests with up to
        `prefill_tokens` context tokens in all, or a single longer one."""
        room_tokens = self.prefill_tokens
        while self._queue and self._free and not self._cache_full:
            request = next(iter(self._queue.values()))
            if self._awaiting_prefill and len(request.tokens) > room_tokens:
                return
            room_tokens -= len(request.tokens)
            slot = self._free.pop()
            self._slot_of[request.id] = slot
            self._table.fill(slot, self._queue.pop(request.id))
            self._awaiting_prefill.append(slot)

    def _prefill(self, decoder: Decoder) -> None:
        """Prefill the contexts of new slots into the cache, without the last token, which is decoded."""
        length = self._table.length
        in_order = sorted(self._awaiting_prefill, key=lambda slot: (length[slot], slot))
        placed = [slot for slot in in_order if self._cache.allocate(slot, int(length[slot]) - 1)]
        if not placed:
            return
        for wave in self._waves(placed):
            for slot, (other, shared) in wave.items():
                if shared:
                    self._cache.copy(other, slot, shared)
            shares = {slot: shared for slot, (_, shared) in wave.items()}
            self._cache.prefill(decoder, self._table, shares, self._pass_tokens)
        self._awaiting_prefill = [slot for slot in self._awaiting_prefill if slot not in set(placed)]
        self._cache_full = bool(self._awaiting_prefill)
        self._batch = None

    def _waves(self, placed: list[int]) -> list[Wave]:
        """The order in which to prefill the slots `placed`, in waves: a slot may copy a prefix of its context from a
        slot of an earlier wave (`shared_prefixes`). With `keep_cache` none is copied, since it may come from older
        weights."""
        unfilled = set(self._awaiting_prefill)
        filled = [slot for slot in self._slot_of.values() if slot not in unfilled and not self.keep_cache]
        return shared_prefixes(self._table, placed, filled)

    def _launch(self, decoder: Decoder, batch: DecodeBatch) -> DecodeStep:
        """Launch a decode step, which samples the next token of every running sequence; earlier steps may still be
        unread. An accelerator computes it while the host goes on."""
        uniform = to_device(uniforms(batch.stream, batch.lengths + batch.unread), self.device)
        logits = self._cache.decode(decoder, batch)
        tokens, logprobs = sample(logits, uniform, batch.plan)
        batch.advance(tokens)
        return DecodeStep.begun(batch, tokens, logprobs)

    def _finish_step(self, step: DecodeStep) -> list[Chunk]:
        """Wait for a launched step, and append its tokens to their sequences; returns the chunks that are full or end a
        sequence, and at a tick (every `report_s` seconds) all new tokens.

        If some logits are not finite, append nothing and fail those sequences.
        """
        batch, (tokens, logprobs) = step.batch, step.read()
        runs = np.ones(len(tokens), bool)
        if batch is not self._batch:  # sequences may have ended since the launch; no slot was filled again
            runs = np.isin(batch.slots, np.fromiter(self._slot_of.values(), np.int64))
        if not np.isfinite(logprobs.sum()) and (failed := ~np.isfinite(logprobs) & runs).any():
            self._batch = self._ahead = None  # they went on from tokens that do not count
            return self._fail(batch.slots[failed])
        batch.append(self._table, tokens, logprobs)
        self.generated_tokens += int(runs.sum())
        return self._collect(batch, runs)

    def _fail(self, slots: np.ndarray) -> list[Chunk]:
        """Fail the sequences in `slots`, whose logits are not finite, and return their tokens as chunks; the others
        sample the token of this step again in the next one.

        Raises EngineError if several run and none has finite logits, which means that the weights are bad.
        """
        why = f"weights {self.version} give logits that are not finite"
        if len(slots) == len(self._slot_of) > 1:
            raise EngineError(f"{why}; load others")
        chunks = []
        for slot in map(int, slots):
            self._failures.append((self._table.request_id[slot], why))
            chunks += self._take_chunk(slot)
            self._cache.zero(slot)
            self._free_slot(slot)
        return chunks

    def _new_batch(self) -> DecodeBatch | None:
        """Move sequences that have outgrown their place in the cache to larger ones, evicting others if the cache is
        full. Then build and return a new decode batch; None if no sequence is left in the cache."""
        running, stored = np.fromiter(self._slot_of.values(), np.int64), self._table.length - 1
        for slot in map(int, self._cache.outgrown(running, stored[running])):
            while slot not in self._awaiting_prefill and not self._cache.promote(slot, stored):
                self._evict(stored)
        slots = self._cache.batch_order()
        if not len(slots):
            return None
        return DecodeBatch(
            self._table, slots, self._cache.capacities_of(slots) + 1, self.chunk_tokens, self.shape.vocabulary,
            self.device,
        )  # fmt: skip

    def _evict(self, stored: np.ndarray) -> None:
        """Free the cache of the sequence admitted last among those in the cache; it is prefilled again when there is
        room. `stored`: int [slots], number of positions with keys and values in each slot."""
        youngest = next(slot for slot in reversed(self._slot_of.values()) if slot not in self._awaiting_prefill)
        self._cache.release(youngest, stored)
        self._awaiting_prefill.append(youngest)
        self._cache_full = True

    def _collect(self, batch: DecodeBatch, runs: np.ndarray) -> list[Chunk]:
        """The chunks to return after a decode step: those that are full or end a sequence, and at a tick (every
        `report_s` seconds) all new tokens. Ended sequences free their slots. `runs`: bool [n], rows of sequences that
        had not ended before."""
        is_tick, table = self._ticks.passed(time.monotonic()), self._table
        stopped = batch.stopped()
        if not (stopped.any() or (batch.lengths >= batch.due_at).any() or is_tick):
            return []
        lengths, slots, self._batch = batch.lengths, batch.slots, None
        full = lengths >= table.max_length[slots]
        due = is_tick | (lengths - table.handed_over[slots] >= self.chunk_tokens)
        chunks = []
        for row in np.flatnonzero((stopped | full | due) & runs):
            slot = int(slots[row])
            ended: Finish | None = "stop" if stopped[row] else "length" if full[row] else None
            chunks += self._take_chunk(slot, ended)
            if ended:
                self._free_slot(slot)
        return chunks

    def _take_chunk(self, slot: int, finish_reason: Finish | None = None) -> list[Chunk]:
        """The slot's tokens that no chunk has returned yet, as a list of one chunk; an empty list if there are none.
        `finish_reason`: that of the chunk, None while the sequence goes on."""
        table = self._table
        new = slice(int(table.handed_over[slot]), int(table.length[slot]))
        table.handed_over[slot] = new.stop
        if new.start == new.stop or self.version is None:
            return []
        tokens, logprobs = table.tokens[slot, new].copy(), table.logprobs[slot, new].copy()
        return [Chunk(table.request_id[slot], tokens, logprobs, self.version, finish_reason)]

    def _free_slot(self, slot: int) -> None:
        del self._slot_of[self._table.request_id[slot]]
        if slot in self._awaiting_prefill:
            self._awaiting_prefill.remove(slot)
            self._cache_full = self._cache_full and bool(self._awaiting_prefill)
        else:
            self._cache.release(slot, self._table.length - 1)
        self._free.append(slot)
        self._batch = None
        if not self._slot_of:
            self._ahead = None
