"""State of the embedded engine in arrays: all slots, the batch of running slots, and the prefixes that slots share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from april.workers.engines.base import Request
from april.workers.engines.embedded.sampling import SamplingPlan, stream_of


class SlotTable:
    """State of all slots, one array per quantity; the entries of a free slot are meaningless."""

    def __init__(self, slots: int, max_context: int):
        self.max_context = max_context
        self.request_id = [0] * slots
        self.length = np.zeros(slots, np.int64)
        """int64 [slots]: number of context tokens, prompt and response, of each slot. The last one is not in the KV
        cache yet."""
        self.max_length = np.zeros(slots, np.int64)
        """int64 [slots]: number of context tokens at which the slot's response has used up its token budget."""
        self.handed_over = np.zeros(slots, np.int64)
        """int64 [slots]: number of context tokens that the engine's caller already has, the prompt included."""
        self.stream = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.zeros(slots)
        self.stop_ids = np.full((slots, 1), -1, np.int64)
        """Stop token ids of each slot, padded with -1."""
        self.tokens = np.zeros((slots, min(256, max_context)), np.int32)
        self.logprobs = np.zeros(self.tokens.shape, np.float32)
        """float32 [slots, length]: log-probabilities of the context tokens whose ids are in `tokens`. Both arrays grow
        to the longest context so far."""

    def fill(self, slot: int, request: Request) -> None:
        length = len(request.tokens)
        self.request_id[slot] = request.id
        self.reserve(length + 1)
        self.tokens[slot, :length] = request.tokens
        self.length[slot] = self.handed_over[slot] = length
        self.max_length[slot] = length + request.max_new_tokens
        self.stream[slot] = stream_of(request.seed)
        self.temperature[slot] = request.temperature
        self.top_k[slot] = request.top_k
        self.top_p[slot] = request.top_p
        stops = sorted(request.stop_token_ids)
        if len(stops) > self.stop_ids.shape[1]:
            missing = len(stops) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops

    def reserve(self, length: int) -> None:
        width = self.tokens.shape[1]
        if length > width:
            grown = min(self.max_context, max(length, 2 * width)) - width
            self.tokens = np.pad(self.tokens, ((0, 0), (0, grown)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, grown)))


class DecodeBatch:
    """The running slots in cache order, with the arrays that a decode step needs.

    It is rebuilt when the set of running slots changes, or when a row has reached its length in `due_at`. The steps in
    between only update whole arrays.
    """

    def __init__(
        self,
        table: SlotTable,
        slots: np.ndarray,
        full_at: np.ndarray,
        chunk_tokens: int,
        vocabulary: int,
        device: torch.device,
    ):
        """`slots`: int64 [n], the slot of each row. `full_at`: int64 [n], the context length at which a row has
        outgrown its place in the cache. `chunk_tokens`: number of tokens of a row that are returned as a full chunk."""
        self.slots = slots
        self.lengths = table.length[slots]
        self.due_at = np.minimum(np.minimum(table.max_length[slots], table.handed_over[slots] + chunk_tokens), full_at)
        """int64 [n]: context length at which a row ends, hands over its next chunk of tokens, or moves to a longer part
        of the cache."""
        self.steps_left = int((self.due_at - self.lengths).min())
        """Number of decode steps that can still be launched before the first row reaches its length in `due_at`."""
        self.unread = 0
        """Number of launched decode steps whose sampled tokens have not been read and appended to the rows yet."""
        table.reserve(int(self.due_at.max()))
        self.stream = table.stream[slots]
        self.plan = SamplingPlan.of(
            table.temperature[slots], table.top_k[slots], table.top_p[slots], vocabulary, device
        )
        self._stop_ids = table.stop_ids[slots]
        self._sampled = table.tokens[slots, self.lengths - 1].astype(np.int64)
        self.last = torch.from_numpy(self._sampled).to(device)
        """int64 [n]: the token of each row to decode next, at `positions`."""
        self.positions = torch.from_numpy(self.lengths - 1).to(device)

    def advance(self, tokens: Tensor) -> None:
        """Make the tokens that were sampled last, int64 [n] on the device, the ones that the next step decodes, one
        position further."""
        self.last = tokens
        self.positions += 1
        self.unread += 1
        self.steps_left -= 1

    def append(self, table: SlotTable, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append to each row one sampled token, int64 [n], and its log-probability, float32 [n]."""
        self._sampled = tokens
        table.tokens[self.slots, self.lengths] = tokens
        table.logprobs[self.slots, self.lengths] = logprobs
        self.lengths += 1
        table.length[self.slots] = self.lengths
        self.unread -= 1

    def stopped(self) -> np.ndarray:
        """bool [n]: rows whose last token is one of their stop tokens."""
        return (self._stop_ids == self._sampled[:, None]).any(axis=1)


@dataclass(frozen=True)
class DecodeStep:
    """A launched decode step of a batch, whose tokens are on their way to the host."""

    batch: DecodeBatch
    tokens: Tensor
    logprobs: Tensor
    copied: torch.cuda.Event | None
    """Event after which the host may read `tokens` and `logprobs`; None on a CPU."""

    @classmethod
    def begun(cls, batch: DecodeBatch, tokens: Tensor, logprobs: Tensor) -> "DecodeStep":
        """The decode step of `batch` that sampled `tokens`, int64 [n], with `logprobs`, float32 [n], both on the
        device. It starts to copy them to the host, and does not wait for them."""
        host_tokens, host_logprobs = tokens.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)
        copied = None
        if tokens.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        return cls(batch, host_tokens, host_logprobs, copied)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the step's results: sampled tokens, int64 [n], and their log-probabilities, float32 [n]."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tokens.numpy(), self.logprobs.numpy()


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `values` on the device, with their dtype; the host does not wait for the copy to an accelerator."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# --- shared prefixes --------------------------------------------------------------------------------------------------

MIN_SHARED_TOKENS = 64
"""Shortest prefix worth sharing; below it, recomputing is cheaper than prefilling the rest separately."""
Wave = dict[int, tuple[int, int]]
"""Slots to prefill together: slot -> (source slot, leading tokens to copy from it), or (itself, 0) to copy none."""


def shared_prefixes(table: SlotTable, unfilled: Sequence[int], filled: Sequence[int]) -> list[Wave]:
    """Plan for the prefill of the `unfilled` slots in which a prefix that contexts share, such as a group's prompt or a
    template, is computed only once: waves, in order. A slot copies the prefix from a slot of an earlier wave or of
    `filled`, the slots whose context is in the cache already.

    The last token of a context does not count as part of a prefix: it is decoded.
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
    """(slot of `others` with the longest common prefix, prefix tokens), or (`slot`, 0) if no prefix is worth sharing.

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
