"""Snapshots of weights in `weights.folder`, which the learner's ranks write and workers read. Transformers loads one as
it is.

    FOLDER/step_000012-3/model-0000-0000.safetensors      tensors; each rank writes files of its own
    FOLDER/step_000012-3/model.safetensors.index.json     the file of each tensor
    FOLDER/step_000012-3/config.json ...                  the other files of the model's folder
    FOLDER/step_000012-3/canary.msgpack                   the learner's canary under these weights
    FOLDER/step_000012-3/SHA256SUMS                       the checksum of each file, written last

A worker knows the checksum of the list SHA256SUMS from the broker, and through the list that of every file. With
`weights.delta` most snapshots are deltas to the one before. These have canary.msgpack and SHA256SUMS too, and in place
of the other files:

    FOLDER/step_000013-3/model-0000-0000.delta            what has changed (`april.weights.deltas`)
    FOLDER/step_000013-3/chain.msgpack                    the snapshots that it rests on, each with its checksum
"""

import hashlib
import logging
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec
import orjson
import torch
from torch import Tensor

from april.config import Config
from april.config.section import AUTO
from april.config.stored import CHECKSUMS_FILE, Sums, format_checksums, parse_checksums
from april.util import clock
from april.util.lifetime import in_background
from april.util.objects import PIECE_BYTES, TIMEOUT_S, ObjectStore, StoreRefused
from april.weights.canary import Canary
from april.weights.channel import TensorHead
from april.weights.deltas import apply_delta, delta_pieces
from april.weights.snapshot import (
    DTYPES,
    ReusedBuffers,
    Snapshot,
    SnapshotError,
    byte_size,
    empty_buffer,
    layout,
    unpack,
)
from april.wire.message import Version
from april.wire.training import WeightFolder

log = logging.getLogger(__name__)

NAME = re.compile(r"step_(\d{6,})-(\d+)")
FILE_BYTES = 2**30
"""Maximum number of bytes of tensors in a file, unless a single tensor is larger. Several files can be read and checked
in parallel."""
READERS = 4
"""Maximum number of files that a worker reads at a time."""
CANARY_FILE = "canary.msgpack"
INDEX_FILE = "model.safetensors.index.json"
CHAIN_FILE = "chain.msgpack"
TENSORS = ".safetensors"
DELTAS = ".delta"
FORMAT_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of dtypes in safetensors files."""
HEADER_ALIGNMENT_BYTES = 16
LENGTH = struct.Struct("<Q")
"""Layout of the first bytes of a safetensors file, which have the length of its header: uint64."""
WAITS_OF_A_CALL = 2
"""Number of read timeouts after which a call to a store that sends nothing fails. It takes two: bytes may have arrived
during the first, but not between the first and the second."""
KEPT = 2
"""Number of the newest snapshots announced to the broker, which are never removed."""


@dataclass(frozen=True)
class WrittenFile:
    """A file of tensors that a rank has written."""

    name: str
    digest: str
    tensors: list[str]
    """Names of the tensors in the file."""
    size: int
    """Bytes that the tensors take in the file, or their deltas in a file of deltas."""


@dataclass(frozen=True)
class ReadSnapshot:
    """A snapshot that a worker has read and checked."""

    folder: WeightFolder
    tensors: dict[str, Tensor]
    canary: Canary | None


class SnapshotFolders:
    """The snapshots of one run. Methods that write or read raise StoreError."""

    def __init__(self, objects: ObjectStore, has_deltas: bool = False):
        self.objects, self.has_deltas = objects, has_deltas
        self._superseded: dict[Version, float] = {}
        """For each snapshot that is no longer to be kept: time of the first call of `prune` that did not name it, Unix
        seconds."""

    @classmethod
    def of(cls, config: Config) -> "SnapshotFolders":
        """The snapshots of a run, in `weights.folder`, for a rank that writes them. Contacts no store yet."""
        return cls(ObjectStore(url_of(config)))

    @classmethod
    def to_read(cls, config: Config) -> "SnapshotFolders":
        """The snapshots of a run, for a worker that reads them. A call to the store that gets no bytes fails within
        `weights.transfer_deadline_s` and is not retried: the worker uses an older snapshot meanwhile, and tries this
        one again."""
        timeout_s = config.weights.transfer_deadline_s / WAITS_OF_A_CALL
        return cls(ObjectStore(url_of(config), min(TIMEOUT_S, timeout_s), ()), config.weights.delta != "off")

    # --- writing --------------------------------------------------------------------------------------------

    def write_part(self, part: Snapshot, rank: int, base: Snapshot | None = None) -> list[WrittenFile]:
        """Write the tensors `part` that one rank holds; with `base`, the rank's part of the snapshot before, only what
        has changed since. Returns the files."""

        def write(name: str, pieces: Pieces) -> None:
            self.objects.write_pieces(f"{name_of(part.version)}/{name}", pieces)

        return write_tensors(part, rank, write, base)

    def complete(
        self,
        version: Version,
        files: Sequence[WrittenFile],
        canary: Canary | None,
        others: Mapping[str, bytes],
        chain: Sequence[WeightFolder] = (),
    ) -> WeightFolder:
        """Write the small files of a snapshot (index, canary, checksums), once all ranks have written their `files` of
        tensors. `canary`: None leaves its file out. `others`: content of the model folder's other files, by name.
        `chain`: the snapshots that a delta depends on, from the whole one to its base; empty for a whole one."""
        small = {**others, INDEX_FILE: index_of(files)}
        if chain:
            small = {CHAIN_FILE: msgspec.msgpack.encode(chain)}
        if canary:
            small[CANARY_FILE] = msgspec.msgpack.encode(canary)
        for name, content in small.items():
            self.objects.write(f"{name_of(version)}/{name}", content)
        sums = {file.name: file.digest for file in files}
        sums |= {name: hashlib.sha256(content).hexdigest() for name, content in small.items()}
        checksums = format_checksums(sums).encode()
        self.objects.write(f"{name_of(version)}/{CHECKSUMS_FILE}", checksums)
        return WeightFolder(version, hashlib.sha256(checksums).hexdigest())

    def prune(self, kept: Collection[Version], reading_s: float) -> None:
        """Remove snapshots that no worker needs any more. Two kinds stay: those of the versions `kept`, of which the
        broker tells workers, and those that left `kept` less than `reading_s` seconds ago, since a worker may still be
        reading them. Must not run while a snapshot is being written."""
        found: dict[Version, set[str]] = {}
        for path in self.objects.names():
            folder, _, name = path.partition("/")
            if match := NAME.fullmatch(folder):
                found.setdefault(Version(int(match[2]), int(match[1])), set()).add(name)
        now = clock.now()
        self._superseded = {version: self._superseded.get(version, now) for version in found.keys() - set(kept)}
        for version, since in self._superseded.items():
            if now - since >= reading_s:
                self._remove(version, found[version])

    def _remove(self, version: Version, names: Collection[str]) -> None:
        self.objects.remove_file(f"{name_of(version)}/{CHECKSUMS_FILE}")
        self.objects.remove(name_of(version), set(names) - {CHECKSUMS_FILE})

    # --- reading --------------------------------------------------------------------------------------------

    def chain(self, folder: WeightFolder) -> list[WeightFolder]:
        """The snapshots that a delta depends on, from the whole one to its base; none for a whole one."""
        return self._chain(folder, self._checksums(folder))

    def _chain(self, folder: WeightFolder, sums: Sums) -> list[WeightFolder]:
        if CHAIN_FILE not in sums:
            return []
        return msgspec.msgpack.decode(self._small_file(folder, CHAIN_FILE, sums[CHAIN_FILE]), type=list[WeightFolder])

    def read(
        self, folder: WeightFolder, buffers: ReusedBuffers, timeout_s: float, held: ReadSnapshot | None = None
    ) -> ReadSnapshot:
        """Read and check a snapshot into `buffers`. `held`: the snapshot that the worker read before, to which a delta
        is applied. Raises SnapshotError for a file that is not what was written, or if `held` is not the delta's base;
        StoreError if the snapshot cannot be read within `timeout_s`."""
        deadline, sums = clock.now() + timeout_s, self._checksums(folder)
        chain = self._chain(folder, sums)
        if chain and (held is None or held.folder != chain[-1]):
            at_hand = f"those at hand are {held.folder.version}" if held else "there are none at hand"
            raise SnapshotError(f"weights {folder.version} are a delta to {chain[-1].version}, and {at_hand}")
        base = held.tensors if held and chain else {}
        kind, other = (DELTAS, TENSORS) if chain else (TENSORS, DELTAS)
        if mixed := [name for name in sums if name.endswith(other)]:
            raise SnapshotError(f"{self._url(folder, mixed[0])} is among {kind} files: ranks wrote different forms")
        names = sorted(name for name in sums if name.endswith(kind))
        tensors: dict[str, Tensor] = {}
        for first in range(0, len(names), READERS):
            group = names[first : first + READERS]
            arguments = [(folder, name, sums[name], buffers, deadline, base) for name in group]
            reading = [in_background(self._read_file, *each) for each in arguments]
            wait(reading)  # before an error: whoever tries again has no readers and no buffers beside these
            for file in reading:
                tensors |= file.result()
        if CANARY_FILE not in sums:
            return ReadSnapshot(folder, tensors, None)
        encoded = self._small_file(folder, CANARY_FILE, sums[CANARY_FILE])
        return ReadSnapshot(folder, tensors, msgspec.msgpack.decode(encoded, type=Canary))

    def _checksums(self, folder: WeightFolder) -> Sums:
        return parse_checksums(self._small_file(folder, CHECKSUMS_FILE, folder.digest).decode())

    def _small_file(self, folder: WeightFolder, name: str, digest: str) -> bytes:
        content = self.objects.read(f"{name_of(folder.version)}/{name}")
        if hashlib.sha256(content).hexdigest() != digest:
            raise SnapshotError(f"{self._url(folder, name)} is damaged: it is not what the learner has written")
        return content

    def _read_file(
        self,
        folder: WeightFolder,
        name: str,
        digest: str,
        buffers: ReusedBuffers,
        deadline: float,
        base: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """The tensors of the snapshot's file `name`, as views of a buffer of their own; of a file of deltas the tensors
        that it makes of `base`. `digest`: the file's expected SHA-256; `deadline`: Unix time, seconds."""
        data = torch.empty(0, dtype=torch.uint8)
        found = hashlib.sha256()

        def begin(size: int) -> memoryview:
            nonlocal data, found
            data, found = empty_buffer(size) if name.endswith(DELTAS) else buffers.take(size), hashlib.sha256()
            return memoryview(data.numpy())

        def check(piece: memoryview) -> None:
            found.update(piece)
            if clock.now() > deadline:
                url = self._url(folder, name)
                raise StoreRefused(f"{url} was not read within weights.transfer_deadline_s; raise it")

        self.objects.read_into(f"{name_of(folder.version)}/{name}", begin, check)
        if found.hexdigest() != digest:
            raise SnapshotError(f"{self._url(folder, name)} is damaged: it is not what the learner has written")
        return unpack(*apply_delta(data, base, buffers)) if name.endswith(DELTAS) else tensors_of(data)

    def _url(self, folder: WeightFolder, name: str) -> str:
        return f"{self.objects.url}/{name_of(folder.version)}/{name}"


def url_of(config: Config) -> str:
    """Folder or URL of the snapshots of a run."""
    folder = config.weights.folder
    if folder == AUTO:
        return str((config.run_dir / "weights").absolute())
    place = folder.rstrip("/") if "://" in folder else Path(folder).absolute()
    return f"{place}/{quote(config.run.name, safe='')}"


def name_of(version: Version) -> str:
    """Name of the folder of a version."""
    return f"step_{version.step:06d}-{version.incarnation}"


# --- safetensors ------------------------------------------------------------------------------------------------------


Pieces = Callable[[], Iterator[bytes | memoryview]]
"""Function that iterates over the content of a file, from its start for each attempt to write it."""


def write_tensors(
    part: Snapshot, rank: int, write: Callable[[str, Pieces], None], base: Snapshot | None = None
) -> list[WrittenFile]:
    """Write the files of the tensors `part` that one rank holds; with `base`, the rank's part of the snapshot before,
    only what has changed since. `write(name, pieces)` writes one file."""
    offsets = dict(zip((head.name for head in part.heads), layout(part.heads)[0], strict=True))
    new, old = (unpack(each.heads, each.data) if base and each else {} for each in (part, base))
    written = []
    for number, heads in enumerate(divided(part.heads)):
        digests: list[str] = []
        deltas = delta_pieces(heads, new, old) if base else []

        def pieces(
            heads: list[TensorHead] = heads, deltas: list[bytes] = deltas, digests: list[str] = digests
        ) -> Iterator[bytes | memoryview]:
            found = hashlib.sha256()
            for piece in deltas or file_pieces(heads, offsets, part.data):
                found.update(piece)
                yield piece
            digests.append(found.hexdigest())

        name = f"model-{rank:04d}-{number:04d}{DELTAS if base else TENSORS}"
        write(name, pieces)
        size = sum(map(len, deltas)) if base else sum(map(byte_size, heads))
        written.append(WrittenFile(name, digests[-1], [head.name for head in heads], size))
    return written


def index_of(files: Sequence[WrittenFile]) -> bytes:
    """Content of `model.safetensors.index.json`: the file of each tensor."""
    weight_map = {tensor: file.name for file in files for tensor in file.tensors}
    index = {"metadata": {"total_size": sum(file.size for file in files)}, "weight_map": weight_map}
    return orjson.dumps(index, option=orjson.OPT_INDENT_2)


def divided(heads: Sequence[TensorHead]) -> list[list[TensorHead]]:
    """Divide tensors among files of at most `FILE_BYTES`. In a file the tensors of the widest dtype come first, so that
    each is aligned."""
    files: list[list[TensorHead]] = []
    size = 0
    for head in heads:
        if not files or size + byte_size(head) > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(head)
        size += byte_size(head)
    return [sorted(file, key=lambda head: -DTYPES[head.dtype].itemsize) for file in files]


def file_pieces(heads: Sequence[TensorHead], offsets: Mapping[str, int], data: Tensor) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, without a copy of the tensors. `offsets`: position of each tensor's first byte
    in `data`, by name."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for head in heads:
        start, end = end, end + byte_size(head)
        place = {"dtype": FORMAT_NAMES[head.dtype], "shape": head.shape, "data_offsets": [start, end]}
        described[head.name] = place
    encoded = orjson.dumps(described)
    encoded += b" " * (-(LENGTH.size + len(encoded)) % HEADER_ALIGNMENT_BYTES)
    yield LENGTH.pack(len(encoded)) + encoded
    for head in heads:
        for piece in data[offsets[head.name] :][: byte_size(head)].split(PIECE_BYTES):
            yield piece.numpy().data


def tensors_of(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file that this module has written, as views of its bytes, uint8."""
    (length,) = LENGTH.unpack(data[: LENGTH.size].numpy().tobytes())
    begin = LENGTH.size + length
    described = orjson.loads(data[LENGTH.size : begin].numpy().tobytes())
    dtypes = {name: DTYPES[dtype] for dtype, name in FORMAT_NAMES.items()}
    found = {}
    for name, place in described.items():
        if name != "__metadata__":
            start, end = place["data_offsets"]
            found[name] = data[begin + start : begin + end].view(dtypes[place["dtype"]]).reshape(place["shape"])
    return found
