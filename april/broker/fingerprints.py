"""What a run is known by beside its keys: start model, tokeniser, chat template, what scores, evaluation's prompts.

All are of contents. A folder may be moved, copied, or sharded anew.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from zlib_ng.zlib_ng import crc32

from april.broker.prompts import PromptBook
from april.config import Config, ConfigError

NONE = "none"
"""of what there was nothing of: it may come later"""
WHOLE_BYTES = 64 << 20
"""weights of at most so many bytes are read whole"""
SAMPLES, SAMPLE_BYTES = 1024, 4096
"""of larger ones, so much in the midst of each tensor, of at most so many tensors"""
HEAD = struct.Struct("<Q")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json",
    "special_tokens_map.json",
)  # fmt: skip
NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "chat_template", "_commit_hash")
"""keys of its JSON files that differ between copies of one model, or have a fingerprint of their own"""
SCORING = ("name", "overlong_buffer_tokens", "overlong_penalty", "format_pattern", "format_penalty")
"""keys of [reward] that say what a response is worth; the others say how it is found out"""


def fingerprints(config: Config, prompts: PromptBook) -> dict[str, str]:
    """By the key that names it, and what of it. The model's weights are left out where they are not on this machine."""
    folder, tokenizer = config.model.path, prompts.tokenizer
    ends = sorted(tokenizer.eos_token_ids)
    tokenizer_bytes = [(folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()]
    found = {
        "model.path (config.json)": of_bytes(canonical(folder / "config.json")),
        "model.path (tokeniser)": of_bytes(
            *tokenizer_bytes, canonical(folder / "tokenizer_config.json"), str(ends).encode()
        ),
        "model.path (chat template)": of_json(tokenizer.inner.chat_template),
        "data.template_options": json.dumps(config.data.template_options, sort_keys=True),
        "agent.chat_template": of_json(config.agent.chat_template),
        "data.eval_path (prompts)": NONE,
        "evaluation.sets (names)": ", ".join(config.evaluation.sets) or NONE,
        "environment.name": config.environment.name,
    }
    for number, one in prompts.held_out.items():
        key = f"{one.asked.key}.path (prompts)" if number else "data.eval_path (prompts)"
        found[key] = one.rows.fingerprint if len(one.rows) else NONE
    found |= {f"reward.{key}": str(getattr(config.reward, key)) for key in SCORING}
    if weights := weights_of(folder):
        found["model.path (weights)"] = weights
    return found


def canonical(path: Path) -> bytes:
    """A JSON file's content without what differs between copies; empty where there is none."""
    if not path.is_file():
        return b""
    try:
        tree = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"key 'model.path': {path} is not JSON ({error}); restore it from a copy") from None
    kept = {key: value for key, value in tree.items() if key not in NOT_OF_THE_MODEL}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


def of_json(value: Any) -> str:
    return of_bytes(json.dumps(value, sort_keys=True).encode()) if value else NONE


def of_bytes(*parts: bytes) -> str:
    checksum = 0
    for part in parts:
        checksum = crc32(part, crc32(HEAD.pack(len(part)), checksum))
    return f"{checksum:08x}"


class Entry(msgspec.Struct):
    """What a safetensors file's head says of a tensor; of `__metadata__` nothing is read."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] | None = None


class Tensor(NamedTuple):
    name: str
    kind: str
    """its type and shape"""
    path: Path
    start: int
    size: int
    """bytes"""
    shape: list[int]


def weights_of(folder: Path) -> str:
    """Of the tensors in a folder's safetensors files, however they are spread over them; empty if there are none.

    Names, types and shapes are taken whole, the values by samples where there are many. Raises ConfigError.
    """
    tensors = sorted(tensor for path in folder.glob("*.safetensors") for tensor in tensors_of(path))
    total = sum(tensor.size for tensor in tensors)
    checksum = crc32(repr([tensor[:2] for tensor in tensors]).encode())
    stride = 1 if total <= WHOLE_BYTES else -(-len(tensors) // SAMPLES)
    for tensor in tensors[::stride]:
        length = tensor.size if total <= WHOLE_BYTES else min(tensor.size, SAMPLE_BYTES)
        with tensor.path.open("rb") as file:
            file.seek(tensor.start + (tensor.size - length) // 2)
            checksum = crc32(file.read(length), checksum)
    return f"{checksum:08x} of {len(tensors)} tensors, {total} bytes" if tensors else ""


def tensors_of(path: Path) -> Iterator[Tensor]:
    with path.open("rb") as file:
        try:
            (length,) = HEAD.unpack(file.read(HEAD.size))
            head = msgspec.json.decode(file.read(min(length, path.stat().st_size)), type=dict[str, Entry])
        except (struct.error, msgspec.DecodeError):
            raise ConfigError(f"key 'model.path': {path} is no safetensors file; restore it from a copy") from None
    for name, entry in head.items():
        if entry.data_offsets:
            start, end = entry.data_offsets
            yield Tensor(
                name, f"{entry.dtype} {entry.shape}", path, HEAD.size + length + start, end - start, entry.shape
            )
