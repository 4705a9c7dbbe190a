"""Deltas of weights: what has changed in each tensor since an earlier version, the base. A file of them:

    length of the header, uint64 | header: a `DeltaTensor` for each tensor, MessagePack | the payload of each block

A tensor is divided into blocks. The payload of each is compressed with zstd and has one of three forms:

    sparse    positions of the values that have changed, as distances to the one before, and their XOR with the base
    xor       the XOR of all values with the base
    whole     the values themselves

Few bfloat16 values change in a step of RL (PULSE, arXiv 2602.03839), and most of these in their last bits: so the XOR
compresses better than the new value. Bytes of one significance lie together, for the same reason.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from april.weights.channel import TensorHead, WeightPart
from april.weights.snapshot import (
    DTYPES,
    ReusedBuffers,
    SnapshotError,
    checksum,
    clear_padding,
    layout,
    on_threads,
    unpack,
    verify,
)

BLOCK_BYTES = 2**24
"""Maximum number of bytes of a block, which bounds the memory that a thread takes for encoding and applying."""
COMPARED_VALUES = 2**18
"""Values of a block that are compared at a time: the result stays in the processor's cache."""
LEVEL = 1
"""Compression level of zstd; level 3 takes longer and saves nothing on these payloads."""
MOST_SPARSE = 0.5
"""Largest share of changed values in a sparse block; above it the XOR of all values takes fewer bytes (measured on
values that are one unit in the last place apart)."""
LENGTH = struct.Struct("<Q")
SPARSE, XOR, WHOLE = "sparse", "xor", "whole"
DISTANCE = np.dtype("<u4")


class WrongBase(SnapshotError):
    """Raised if a delta arrived undamaged, but gives other tensors than the learner has: so the worker's copy of the
    base, to which it was applied, is no longer what the learner sent."""


class DeltaTensor(msgspec.Struct, array_like=True, frozen=True):
    """Description of one tensor in the header of a file of deltas."""

    head: TensorHead
    checksum: str
    """XXH3, 128 bits, of the tensor's bytes once the delta is applied; "" if the checksum of the whole part is sent
    instead."""
    blocks: list[tuple[str, int]]
    """Form of each block, and the size of its payload in bytes."""


def delta_pieces(
    heads: Sequence[TensorHead], new: Mapping[str, Tensor], base: Mapping[str, Tensor], *, checked: bool = True
) -> list[bytes]:
    """The content, in pieces, of a file of deltas that turn the tensors `base` into `new`, which `heads` describe. A
    tensor that `base` does not contain, or contains in another shape or dtype, is in the file whole. `checked`: whether
    the file gets a checksum of each new tensor."""
    described, payloads = [], list[bytes]()
    with on_threads() as submit:
        encoding = []
        for head in heads:
            values, old = words(new[head.name]), words_of_base(head, base)
            pieces = [(values[place], None if old is None else old[place]) for place in blocks(values)]
            found = submit(checksum_of, values) if checked else None
            encoding.append((head, found, [submit(encode, *piece) for piece in pieces]))
        for head, found, encoded in encoding:
            of_blocks = [block.result() for block in encoded]
            payloads += [payload for _, payload in of_blocks]
            forms = [(form, len(payload)) for form, payload in of_blocks]
            described.append(DeltaTensor(head, found.result() if found else "", forms))
    header = msgspec.msgpack.encode(described)
    return [LENGTH.pack(len(header)), header, *payloads]


def apply_delta(
    data: Tensor,
    base: Mapping[str, Tensor],
    buffers: ReusedBuffers,
    part: WeightPart | None = None,
    in_place: Tensor | None = None,
) -> tuple[list[TensorHead], Tensor]:
    """Apply the file of deltas `data`, uint8 [bytes], to the tensors `base`; returns (names, dtypes and shapes of the
    new tensors, their packed bytes). `in_place`: the buffer that holds `base`, to be overwritten; None: write to a new
    buffer, taken from `buffers`. `part`: the learner's description of the result, by which it is checked; None: it is
    checked by the checksums in the file. Raises SnapshotError if the result does not match."""
    content = memoryview(data.numpy())
    try:
        (length,) = LENGTH.unpack(content[: LENGTH.size])
        content = content[LENGTH.size :]
        described = msgspec.msgpack.decode(content[:length], type=list[DeltaTensor])
        content = content[length:]
        heads = [each.head for each in described]
        if part and heads != part.tensors:
            raise SnapshotError("a delta of weights has other tensors than were announced")
        made = buffers.take(layout(heads)[1]) if in_place is None else in_place
        tensors = unpack(heads, made)
        with on_threads() as submit:
            decoding = []
            for each in described:
                values, old = words(tensors[each.head.name]), words_of_base(each.head, base)
                for place, (form, size) in zip(blocks(values), each.blocks, strict=True):
                    of_base = None if old is None else old[place]
                    decoding.append(submit(decode, form, content[:size], of_base, values[place]))
                    content = content[size:]
            for block in decoding:
                block.result()
            checked = [(each, submit(checksum_of, words(tensors[each.head.name]))) for each in described if not part]
            for each, found in checked:
                if found.result() != each.checksum:
                    raise WrongBase(f"tensor {each.head.name} is not the learner's once its delta is applied")
    except (struct.error, msgspec.DecodeError, zstandard.ZstdError, ValueError, IndexError, MemoryError) as error:
        raise SnapshotError(f"a delta of weights cannot be read: {error}") from error
    if part:
        clear_padding(heads, made)
        if not part.delta_digest:
            verify(made, part.digest)
        elif checksum(made) != part.checksum:
            raise WrongBase("the weights are not the learner's once their delta is applied")
    return heads, made


def checksum_of(values: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(values.data)


def words(tensor: Tensor) -> np.ndarray:
    """The bits of a tensor on the CPU, flat, as unsigned integers of its values' size."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"<u{tensor.dtype.itemsize}")


def words_of_base(head: TensorHead, base: Mapping[str, Tensor]) -> np.ndarray | None:
    tensor = base.get(head.name)
    fits = tensor is not None and tensor.dtype == DTYPES.get(head.dtype) and list(tensor.shape) == head.shape
    return words(tensor) if tensor is not None and fits else None


def blocks(values: np.ndarray) -> Iterator[slice]:
    each = BLOCK_BYTES // values.itemsize
    return (slice(first, first + each) for first in range(0, values.size, each))


def encode(new: np.ndarray, old: np.ndarray | None) -> tuple[str, bytes]:
    """Encode the values `new` of a block as a delta from the base's values `old`, or whole if that is shorter or `old`
    is None. Returns (form: sparse | xor | whole, compressed payload)."""
    zstd = zstandard.ZstdCompressor(LEVEL)
    if old is None:
        return WHOLE, zstd.compress(planes(new))
    found, changed = list[np.ndarray](), list[np.ndarray]()
    for first in range(0, new.size, COMPARED_VALUES):
        compared, of_base = (values[first:][:COMPARED_VALUES] for values in (new, old))
        at = np.flatnonzero(compared != of_base)
        found.append(at + first)
        changed.append(compared[at] ^ of_base[at])
    if sum(map(len, found)) <= MOST_SPARSE * new.size:
        distances = np.diff(np.concatenate(found), prepend=0).astype(DISTANCE)
        return SPARSE, zstd.compress(planes(distances) + planes(np.concatenate(changed)))
    candidates = [(XOR, zstd.compress(planes(new ^ old))), (WHOLE, zstd.compress(planes(new)))]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def decode(form: str, payload: memoryview, old: np.ndarray | None, into: np.ndarray) -> None:
    """Decode the block `payload` into the array `into`. `form`: sparse | xor | whole; `old`: the base's values of the
    block, whose memory `into` may share. Raises ZstdError, ValueError or IndexError if the payload is not of this form
    and size."""
    if zstandard.frame_content_size(payload) > into.size * (DISTANCE.itemsize + into.itemsize):
        raise ValueError("a block is too long")
    raw = zstandard.ZstdDecompressor().decompress(payload)
    if form == WHOLE:
        into[:] = from_planes(raw, into.dtype)
    elif old is None:
        raise ValueError("the base lacks a tensor")
    elif form == XOR:
        np.bitwise_xor(old, from_planes(raw, into.dtype), out=into)
    else:
        end = len(raw) // (DISTANCE.itemsize + into.itemsize) * DISTANCE.itemsize
        places = np.cumsum(from_planes(raw[:end], DISTANCE), dtype=np.int64)
        if into.ctypes.data != old.ctypes.data:
            into[:] = old
        into[places] ^= from_planes(raw[end:], into.dtype)


def planes(values: np.ndarray) -> bytes:
    """Bytes of values regrouped by significance: the first byte of every value, then the second of every value, and so
    on."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def from_planes(raw: bytes, dtype: np.dtype) -> np.ndarray:
    spread = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(spread.T).view(dtype).reshape(-1)
