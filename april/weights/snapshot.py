"""One version of the weights as a flat buffer with a table of contents, as it is sent over a weight channel; and the
form in which an SGLang server gets and holds the same weights."""

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec import structs
from torch import Tensor
from torch.nn.functional import pad

from april.weights.canary import Canary
from april.weights.channel import Adapter, TensorHead, WeightPart
from april.wire.message import Version

log = logging.getLogger(__name__)

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
ALIGNMENT_BYTES = 16
"""Alignment of tensors in a snapshot's buffer: every tensor starts at a multiple of this many bytes."""
DIGEST_BLOCK_BYTES = 2**22
"""Bytes that one thread hashes at a time."""
CHECKSUM_BLOCK_BYTES = 2**25
"""Bytes of an accelerator's memory whose checksum is computed at a time."""
MIXERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
"""Odd multipliers of `device_checksum`: together with shifts they spread each bit of a 64-bit word over the whole
word."""
MOST_THREADS = 8
"""Maximum number of threads of a process that hash, encode and decode blocks of weights."""


class SnapshotError(RuntimeError):
    """The bytes of received weights do not match their manifest."""


@dataclass(frozen=True)
class Snapshot:
    """The packed weights of one version, or of the part of it that one rank of the learner sends."""

    version: Version
    heads: list[TensorHead]
    data: Tensor
    """The packed bytes of all tensors, uint8 [bytes], on the device of the transport."""
    checksum: str
    """`checksum` of `data`."""
    sha256: "Once"
    """Function that returns `digest` of `data`; the first call computes it."""
    canary: Canary | None = None
    adapter: Adapter | None = None
    """How to merge the tensors, if they are an adapter's; None if they are complete weights."""
    others: tuple[WeightPart, ...] = ()
    """On rank 0: descriptions of the parts of the same version that the learner's other ranks hold; empty on those
    ranks."""
    server_checksums: Mapping[str, str] = field(default_factory=dict)
    """Expected checksums of an inference server's tensors, by the server's names; empty unless all parts of the version
    have reported theirs."""

    @property
    def digest(self) -> str:
        """`digest` of `data`, which the first call computes."""
        return self.sha256()

    @property
    def part(self) -> WeightPart:
        """Description of the tensors in `data`, without their SHA-256."""
        return WeightPart(self.heads, self.data.numel(), self.checksum)

    @property
    def hashed_part(self) -> WeightPart:
        """Description of the tensors in `data` with their SHA-256, which the first call computes."""
        return structs.replace(self.part, digest=self.digest)

    @property
    def parts(self) -> list[WeightPart]:
        """Descriptions of all parts of the version, beginning with this one."""
        return [self.part, *self.others]


class Once:
    """A function that computes a text (a digest) when a thread first calls it, and then returns the same to all
    threads."""

    def __init__(self, compute: Callable[[], str]):
        self._compute, self._lock, self._found = compute, threading.Lock(), ""

    def __call__(self) -> str:
        with self._lock:
            self._found = self._found or self._compute()
        return self._found


def snapshot_of(version: Version, heads: list[TensorHead], data: Tensor, *more: Any) -> Snapshot:
    """The snapshot of the packed buffer `data`. `more`: values of the further fields of `Snapshot`, in order."""
    return Snapshot(version, heads, data, checksum(data), Once(partial(digest, data)), *more)


def joint_checksum(parts: Iterable[WeightPart]) -> str:
    """Checksum of a whole version. If the version has one part, it is that part's; otherwise that of all parts'
    checksums, one after the other."""
    first, *others = checksums = [part.checksum for part in parts]
    return xxhash.xxh3_128_hexdigest("".join(checksums).encode()) if others else first


def pack(
    version: Version,
    tensors: Mapping[str, Tensor],
    canary: Canary | None = None,
    adapter: Adapter | None = None,
    take: Callable[[int], Tensor] | None = None,
) -> Snapshot:
    """Copy tensors into one buffer, in the order of the mapping, and describe them in a snapshot. `canary`, `adapter`:
    fields of the snapshot. `take`: function that returns a buffer of a size, uint8 [bytes]; None: allocate one."""
    heads = [TensorHead(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
    return pack_each(version, heads, tensors.values(), canary, adapter, take)


def pack_each(
    version: Version,
    heads: list[TensorHead],
    tensors: Iterable[Tensor],
    canary: Canary | None = None,
    adapter: Adapter | None = None,
    take: Callable[[int], Tensor] | None = None,
) -> Snapshot:
    """As `pack`, for tensors that are computed one after the other; `heads`: their names, dtypes and shapes."""
    offsets, total = layout(heads)
    data = (take or empty_buffer)(total)
    for offset, tensor in zip(offsets, tensors, strict=True):
        flat = tensor.detach().to(data.device).contiguous().reshape(-1).view(torch.uint8)
        data[offset : offset + flat.numel()] = flat
    clear_padding(heads, data)
    return snapshot_of(version, heads, data, canary, adapter)


def clear_padding(heads: list[TensorHead], data: Tensor) -> None:
    """Set the bytes between the tensors of a snapshot's buffer to 0."""
    for offset, head in zip(layout(heads)[0], heads, strict=True):
        size = byte_size(head)
        data[offset + size :][: -size % ALIGNMENT_BYTES] = 0


def empty_buffer(size: int, device: str = "cpu") -> Tensor:
    """A new buffer for a snapshot, uint8 [size]. numpy asks the kernel for huge pages, with which filling it takes a
    third of the time."""
    if device != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.empty(max(size, 1), np.uint8))[:size]  # an empty one of its own has no stride


SPARE_BYTES = 2**20
"""Maximum number of bytes by which a reused buffer may exceed the size that is asked for, so that data with and without
a file's header can use the same one."""


class ReusedBuffers:
    """Buffers for snapshots, of which each is used again once no tensor lies in it any more. Those that fit nothing any
    more are freed.

    In a process that uses an accelerator, each is page-locked once, so that copies to the accelerator are faster. In
    other processes every buffer is a new one. With `stay`, buffers are reused in every process and never page-locked.
    If `device` is an accelerator, every buffer is a new one, since torch's allocator reuses their memory. Several
    threads may take buffers.
    """

    def __init__(self, device: str = "cpu", stay: bool = False) -> None:
        self.device, self.stay = device, stay
        self._lock = threading.Lock()
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
        """Page-locked memory, and the view of it that its tensors keep alive."""

    def take(self, size: int) -> Tensor:
        """A buffer of any content, uint8 [size]."""
        if self.device != "cpu" or not (size and (self.stay or torch.cuda.is_initialized())):
            return empty_buffer(size, self.device)
        with self._lock:
            free = [memory for memory, view in self._buffers if view() is None]
            fitting = [memory for memory in free if size <= memory.size <= size + SPARE_BYTES]
            if fitting:
                return self._used(min(fitting, key=len), size)
            self._buffers = [(memory, view) for memory, view in self._buffers if view() is not None]
            del free
        memory = np.empty(size, np.uint8)
        if not self.stay and not page_lock(memory):
            return torch.from_numpy(memory)
        with self._lock:
            return self._used(memory, size)

    def _used(self, memory: np.ndarray, size: int) -> Tensor:
        """`size` bytes of this memory as a tensor. The memory counts as used as long as the tensor, or a view of it,
        lives."""
        view = memory[:size]
        self._buffers = [held for held in self._buffers if held[0] is not memory] + [(memory, weakref.ref(view))]
        return torch.from_numpy(view)


def page_lock(memory: np.ndarray) -> bool:
    """Register memory for copies by an accelerator until it is freed; returns whether the system permits it."""
    runtime, address, for_all_contexts = torch.cuda.cudart(), memory.ctypes.data, 1
    if error := int(runtime.cudaHostRegister(address, memory.nbytes, for_all_contexts)):
        log.info("%d bytes for weights could not be page-locked (CUDA error %d)", memory.nbytes, error)
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True


def unpack(heads: list[TensorHead], data: Tensor) -> dict[str, Tensor]:
    """The tensors of a snapshot, by name, as views of its buffer."""
    tensors = {}
    for offset, head in zip(layout(heads)[0], heads, strict=True):
        flat = data[offset : offset + byte_size(head)]
        tensors[head.name] = flat.view(DTYPES[head.dtype]).reshape(head.shape)
    return tensors


def layout(heads: list[TensorHead]) -> tuple[list[int], int]:
    """(list with the offset of each tensor in a snapshot's buffer, total size of the buffer), in bytes. `heads`: the
    tensors in order."""
    offsets, total = [], 0
    for head in heads:
        offsets.append(total)
        total += -(-byte_size(head) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, total


def byte_size(head: TensorHead) -> int:
    if head.dtype not in DTYPES:
        raise SnapshotError(f"tensor {head.name} is of type {head.dtype}; weights are {', '.join(DTYPES)}")
    return torch.Size(head.shape).numel() * DTYPES[head.dtype].itemsize


def verify(data: Tensor, expected: str) -> None:
    """Raises SnapshotError if the `digest` of the received buffer is not `expected`, the digest in the manifest."""
    check(digest(data), expected)


def check(found: str, expected: str) -> None:
    """Raises SnapshotError if `found`, the digest of the received bytes, is not `expected`, the digest in the
    manifest."""
    if found != expected:
        raise SnapshotError("the weights that arrived differ from those that were sent")


def digest(data: Tensor) -> str:
    """SHA-256, in hexadecimal digits, of the SHA-256 digests of a buffer's blocks, which several threads compute; of a
    buffer on an accelerator its `device_checksum`.

    `data`: uint8 [bytes].
    """
    with on_threads() as submit:
        arriving = ArrivingDigest(data, submit)
        arriving.add(data)
        return arriving.result()


class ArrivingDigest:
    """The `digest` of a buffer whose bytes arrive in order: blocks are hashed while others still arrive."""

    def __init__(self, data: Tensor, submit: Callable[..., "Future[Any]"]):
        self._data, self._submit, self._bytes = data, submit, 0
        self._blocks = [block.numpy() for block in data.split(DIGEST_BLOCK_BYTES)] if data.device.type == "cpu" else []
        self._hashed: list[Future[Any]] = []

    def add(self, bucket: Tensor) -> None:
        """Note that the next bytes of the buffer, those in `bucket`, have arrived."""
        self._bytes += bucket.numel()
        whole = self._bytes // DIGEST_BLOCK_BYTES if self._bytes < self._data.numel() else len(self._blocks)
        self._hashed += [self._submit(hashlib.sha256, block) for block in self._blocks[len(self._hashed) : whole]]

    def result(self) -> str:
        """The digest, once all has arrived."""
        if self._data.device.type != "cpu":
            return device_checksum(self._data)
        return hashlib.sha256(b"".join(each.result().digest() for each in self._hashed)).hexdigest()


def checksum(data: Tensor) -> str:
    """XXH3 of a buffer, 128 bits in hexadecimal digits, or its `device_checksum` on an accelerator: tells versions
    apart and finds accidents, at ten times the speed of SHA-256, but does not withstand an attacker.

    `data`: uint8 [bytes].
    """
    return xxhash.xxh3_128_hexdigest(data.numpy()) if data.device.type == "cpu" else device_checksum(data)


def device_checksum(data: Tensor) -> str:
    """128 bits, in hexadecimal digits, that depend on each value of a buffer and on its place, computed where the
    buffer lies: enough against accidents, not against an attacker.

    `data`: uint8 [bytes].
    """
    sums, first = torch.zeros(2, dtype=torch.int64, device=data.device), 0
    for block in data.split(CHECKSUM_BLOCK_BYTES):
        words = pad(block, (0, -len(block) % 8)).view(torch.int64)
        places = torch.arange(first, first + len(words), device=data.device)
        mixed = (words ^ (places * MIXERS[0])) * MIXERS[1]
        mixed = (mixed ^ (mixed >> 29)) * MIXERS[2]
        sums += torch.stack([mixed.sum(), ((mixed ^ (mixed >> 32)) * MIXERS[0]).sum()])
        first += len(words)
    return "".join(f"{each % 2**64:016x}" for each in sums.tolist())


@contextlib.contextmanager
def on_threads() -> Iterator[Callable[..., "Future[Any]"]]:
    """Context manager whose function `submit(f, *arguments)` calls `f` in the process's thread pool for blocks of
    weights, shared by all links and parts, and returns a future. At its end all calls are done; after an error, those
    that have not begun are cancelled."""
    submitted = list["Future[Any]"]()

    def submit(*work: Any) -> "Future[Any]":
        submitted.append(block_threads().submit(*work))
        return submitted[-1]

    try:
        yield submit
    finally:
        wait([each for each in submitted if not each.cancel()])


@cache
def block_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(MOST_THREADS, os.cpu_count() or 1)), "weights-blocks")


os.register_at_fork(after_in_child=block_threads.cache_clear)


def buckets(data: Tensor, bucket_bytes: int) -> list[Tensor]:
    """Divide the buffer into views of at most `bucket_bytes` each, in order."""
    return list(data.split(bucket_bytes))


def outgoing(snapshot: Snapshot, bucket_bytes: int, to_server: bool) -> Iterable[Tensor]:
    """Data of a snapshot to send, uint8 tensors in order: buckets for a worker; with `to_server` whole tensors, several
    concatenated up to `bucket_bytes`, for an inference server."""
    if not to_server:
        return buckets(snapshot.data, bucket_bytes)
    return (joined(snapshot, heads) for heads in server_buckets(snapshot.heads, bucket_bytes))


# --- in an inference server -------------------------------------------------------------------------------------------


def server_buckets(heads: list[TensorHead], bucket_bytes: int) -> list[list[TensorHead]]:
    """Divide tensors into the broadcasts to an inference server: in order, each of one dtype, and at most
    `bucket_bytes` unless a single tensor is larger."""
    groups: list[list[TensorHead]] = []
    free_bytes = 0
    for head in heads:
        size = byte_size(head)
        if not groups or size > free_bytes or head.dtype != groups[-1][-1].dtype:
            groups.append([])
            free_bytes = bucket_bytes
        groups[-1].append(head)
        free_bytes -= size
    return groups


def joined(snapshot: Snapshot, heads: list[TensorHead]) -> Tensor:
    """Bytes of the given tensors (`heads`) of a snapshot, one after the other without padding, uint8 [bytes]."""
    starts = dict(zip((head.name for head in snapshot.heads), layout(snapshot.heads)[0], strict=True))
    return torch.cat([snapshot.data[starts[head.name] :][: byte_size(head)] for head in heads])


FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Name of a layer's module -> name of the module of SGLang that fuses it with others; their tensors are concatenated in
this order."""
PADDED_ROWS = {"gate_proj": 32, "up_proj": 32, "embed_tokens": 64, "lm_head": 64}
"""Name of a module -> number to a multiple of which SGLang pads the rows of its weight."""
PADDED_COLUMNS = {"down_proj": 32}
"""Name of a module -> number to a multiple of which SGLang pads the columns of its weight."""
CHECKSUM_DIGITS = 16
"""Number of hexadecimal digits of a tensor's checksum."""
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` for which `FUSED`, `PADDED_ROWS` and `PADDED_COLUMNS` describe how SGLang holds the
weights."""


def can_predict_checksums(server_info: Mapping[str, Any], model_type: str | None) -> bool:
    """Whether the server's checksums of its tensors can be predicted: `model_type`, from config.json, is one of
    `MODEL_TYPES`, and according to /server_info the server holds the whole model in float32 on a CPU."""
    whole = server_info.get("tp_size", 1) == 1 and not server_info.get("quantization")
    exact = server_info.get("device") == "cpu" and server_info.get("dtype") in ("float32", "float")
    return whole and exact and model_type in MODEL_TYPES


def checksums_in_server(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Expected checksums of the server's tensors, by the server's tensor names, for one tensor-parallel rank.

    `dtype`: dtype of the server's tensors; None: float32.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    dtype = dtype or torch.float32
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0].rpartition(".")[2]
        parts.setdefault(fused_name(name), {})[module] = padded_as_in_server(module, tensor)
    ordered = {name: sorted(own, key=lambda module: [*FUSED, module].index(module)) for name, own in parts.items()}
    return {
        name: server_checksum([parts[name][module] for module in modules], dtype) for name, modules in ordered.items()
    }


def fused_name(name: str) -> str:
    """Name of the server's tensor that contains the model's tensor `name`, fused with others or alone."""
    owner, _, kind = name.rpartition(".")
    outer, _, module = owner.rpartition(".")
    return ".".join(filter(None, [outer, FUSED.get(module, module), kind]))


def padded_as_in_server(module: str, tensor: Tensor) -> Tensor:
    """Zero-pad a tensor's intermediate-size and vocabulary dimensions as the server does."""
    rows = -tensor.shape[0] % PADDED_ROWS.get(module, 1) if tensor.dim() else 0
    columns = -tensor.shape[1] % PADDED_COLUMNS.get(module, 1) if tensor.dim() == 2 else 0
    return pad(tensor, (0, columns, 0, rows) if tensor.dim() == 2 else (0, rows)) if rows or columns else tensor


def server_checksum(tensors: list[Tensor], dtype: torch.dtype) -> str:
    """Checksum of tensors that are concatenated in the server's dtype."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()[:CHECKSUM_DIGITS]
