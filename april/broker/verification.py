"""Verification of the data that a run depends on: its old journal files, and the files that its configuration names.

At a start the broker reads only the journal records after its snapshot. Older records would only be read when a batch
needs them; therefore a thread reads them once, slowly, and reports groups that cannot be read while they can still be
discarded. Fingerprints of model, tokeniser, held-out prompts and scoring show whether a resumed run still uses the ones
that it began with.
"""

import json
import os
import struct
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from zlib_ng.zlib_ng import crc32

from april.broker.journal import records
from april.broker.journal.files import Damaged, Reference, file_path, file_starts
from april.broker.ledger.chunk_refs import ChunkRef
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Group, Sample
from april.broker.prompts import PromptBook
from april.config import Config
from april.util.errors import refuse

PAUSE_S = 0.02
"""Pause after each slice of reads, seconds, so that other users get disk and processor time."""
READS, READ_BYTES = 256, 1 << 20
"""Most reads and most bytes in one slice."""


class StoredGroup(NamedTuple):
    """A group of the ledger and the references to its data in the journal."""

    group: int
    prompt: Reference
    samples: list[Sample]
    """Copies of the group's samples, made at the start of the verification."""


class JournalVerifier:
    """Reads, once, everything before a journal position that a ledger refers to.

    verifier = JournalVerifier(journal.folder, ledger, below=snapshot_position)
    verifier.start()
    verifier.take()          # ids of unreadable groups found since the last call
    """

    def __init__(self, folder: Path, ledger: Ledger, below: int):
        self.folder, self.below = folder, below
        self._stored = [
            StoredGroup(group.id, group.prompt, [replace(sample) for sample in group.samples_with_forks])
            for group in (ledger.groups.values() if below else ())
        ]
        self._found: deque[int] = deque()
        self._files: dict[int, int] = {}
        self._starts: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[int]:
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._starts = file_starts(self.folder)
        reads = size = 0
        try:
            for stored in self._stored:
                for check, length in self._checks(stored):
                    if not check():
                        self._found.append(stored.group)
                        break
                    reads, size = reads + 1, size + length
                    if reads >= READS or size >= READ_BYTES:
                        reads = size = 0
                        if self._stopped.wait(PAUSE_S):
                            return
        finally:
            self._stored.clear()
            for file in self._files.values():
                os.close(file)

    def _checks(self, stored: StoredGroup) -> Iterator[tuple[Callable[[], bool], int]]:
        """Yield (function that checks a record or payload, bytes that it reads) for all data of a group before position
        `below`."""
        position, length = stored.prompt
        if position < self.below:
            yield partial(self._has_record, position, length), length
        for sample in stored.samples:
            for ref in sample.chunk_refs:
                if ref.record < self.below:
                    yield partial(self._has_payload, ref), ref.size

    def _has_record(self, position: int, length: int) -> bool:
        return records.decode(self._read(position, 0, length)) is not None

    def _has_payload(self, ref: ChunkRef) -> bool:
        payload = self._read(ref.record, ref.offset, ref.size)
        return len(payload) == ref.size and crc32(payload) == ref.checksum

    def _read(self, record: int, offset: int, size: int) -> bytes:
        """Read a part of a journal record; empty if it cannot be read or its file was deleted meanwhile as no longer
        needed."""
        start = self._starts[bisect_right(self._starts, record) - 1]
        try:
            if start not in self._files:
                self._files[start] = os.open(file_path(self.folder, start), os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[start], size, record - start + offset)
        except OSError:
            return b""


def groups_with_damage(ledger: Ledger, damaged: Damaged) -> list[Group]:
    """The groups of a ledger whose data includes the journal bytes that could not be read."""
    record, offset = damaged.record, damaged.offset
    return [
        group
        for group in ledger.groups.values()
        if group.prompt[0] == record
        or any(ref[:2] == (record, offset) for sample in group.samples_with_forks for ref in sample.chunk_refs)
    ]


# --- fingerprints -----------------------------------------------------------------------------------------------------


NO_FINGERPRINT = "none"
"""Fingerprint of something that the configuration does not set; it may be added later in the run."""
WHOLE_WEIGHTS_BYTES = 64 << 20
"""Weights of at most this many bytes are read completely for their fingerprint."""
SAMPLED_TENSORS, SAMPLE_BYTES = 1024, 4096
"""For larger weights: most tensors read for the fingerprint, and bytes read from the middle of each."""
LENGTH_PREFIX = struct.Struct("<Q")
"""Layout of the length prefix at the beginning of a safetensors file."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
    "special_tokens_map.json",
)  # fmt: skip
IGNORED_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "chat_template", "_commit_hash")
"""Keys of a model's JSON files that its fingerprint ignores: they differ between copies, or have a separate
fingerprint."""
SCORING_KEYS = ("name", "overlong_buffer_tokens", "overlong_penalty", "format_pattern", "format_penalty")
"""Keys of [reward] that determine a score; the other keys only say how it is computed."""


def fingerprints(config: Config, prompts: PromptBook) -> dict[str, str]:
    """Fingerprints of the contents that configuration keys refer to, by key. That of the weights is missing if they are
    not on this machine."""
    folder, tokenizer = config.model.path, prompts.tokenizer
    ends = sorted(tokenizer.eos_token_ids)
    tokenizer_bytes = [(folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()]
    found = {
        "model.path (config.json)": fingerprint_of_bytes(canonical_json(folder / "config.json")),
        "model.path (tokeniser)": fingerprint_of_bytes(
            *tokenizer_bytes, canonical_json(folder / "tokenizer_config.json"), str(ends).encode()
        ),
        "model.path (chat template)": fingerprint_of_json(tokenizer.inner.chat_template),
        "data.template_options": json.dumps(config.data.template_options, sort_keys=True),
        "agent.chat_template": fingerprint_of_json(config.agent.chat_template),
        "data.eval_path (prompts)": NO_FINGERPRINT,
        "evaluation.sets (names)": ", ".join(config.evaluation.sets) or NO_FINGERPRINT,
        "environment.name": config.environment.name,
    }
    for number, held_out in prompts.held_out.items():
        key = f"{held_out.settings.key}.path (prompts)" if number else "data.eval_path (prompts)"
        found[key] = held_out.rows.fingerprint if len(held_out.rows) else NO_FINGERPRINT
    found |= {f"reward.{key}": str(getattr(config.reward, key)) for key in SCORING_KEYS}
    if weights := weights_fingerprint(folder):
        found["model.path (weights)"] = weights
    return found


def canonical_json(path: Path) -> bytes:
    """Content of a JSON file in canonical form, without the `IGNORED_KEYS`; empty if there is no such file. Raises
    ConfigError."""
    if not path.is_file():
        return b""
    try:
        tree = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        refuse("model.path", path.parent, f"has a {path.name} that is not JSON ({error})", "restore it from a copy")
    kept = {key: value for key, value in tree.items() if key not in IGNORED_KEYS}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


def fingerprint_of_json(value: Any) -> str:
    return fingerprint_of_bytes(json.dumps(value, sort_keys=True).encode()) if value else NO_FINGERPRINT


def fingerprint_of_bytes(*parts: bytes) -> str:
    checksum = 0
    for part in parts:
        checksum = crc32(part, crc32(LENGTH_PREFIX.pack(len(part)), checksum))
    return f"{checksum:08x}"


class TensorEntry(msgspec.Struct):
    """Entry of a tensor in a safetensors header; for `__metadata__` all fields keep their defaults."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] | None = None


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, located by its offset and size."""

    name: str
    kind: str
    """Data type and shape of the tensor."""
    path: Path
    start: int
    """Offset of the tensor's data in the file, bytes."""
    size: int
    """Size of the tensor's data, bytes."""
    shape: list[int]


def weights_fingerprint(folder: Path) -> str:
    """Fingerprint of the tensors in a folder's safetensors files, independent of sharding; empty without files.

    It covers all names, types and shapes, and the values: all of them or, of large weights, a sample. Raises
    ConfigError.
    """
    tensors = sorted(tensor for path in folder.glob("*.safetensors") for tensor in tensors_of(path))
    total = sum(tensor.size for tensor in tensors)
    checksum = crc32(repr([tensor[:2] for tensor in tensors]).encode())
    stride = 1 if total <= WHOLE_WEIGHTS_BYTES else -(-len(tensors) // SAMPLED_TENSORS)
    for tensor in tensors[::stride]:
        length = tensor.size if total <= WHOLE_WEIGHTS_BYTES else min(tensor.size, SAMPLE_BYTES)
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + (tensor.size - length) // 2)
            checksum = crc32(file.read(length), checksum)
    return f"{checksum:08x} of {len(tensors)} tensors, {total} bytes" if tensors else ""


def tensors_of(path: Path) -> Iterator[StoredTensor]:
    """The tensors in a safetensors file. Raises ConfigError if the file is not one."""
    with path.open("rb") as file:
        try:
            (length,) = LENGTH_PREFIX.unpack(file.read(LENGTH_PREFIX.size))
            head = msgspec.json.decode(file.read(min(length, path.stat().st_size)), type=dict[str, TensorEntry])
        except (struct.error, msgspec.DecodeError):
            refuse(
                "model.path", path.parent, f"has a {path.name} that is no safetensors file", "restore it from a copy"
            )
    for name, entry in head.items():
        if entry.data_offsets:
            start, end = entry.data_offsets
            yield StoredTensor(
                name,
                f"{entry.dtype} {entry.shape}",
                path,
                LENGTH_PREFIX.size + length + start,
                end - start,
                entry.shape,
            )
