"""The journal's first record, which pins the settings of a run and fingerprints of the files that they name.

The fingerprints of model, tokeniser, held-out prompts and scoring show whether a resumed run still uses the ones that
it began with.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from zlib_ng.zlib_ng import crc32

from april.broker.journal.files import JournalError
from april.broker.ledger.events import RunStarted
from april.broker.plan import ledger_rules
from april.broker.prompts import PromptBook
from april.config import Config
from april.config.algorithms import response_budget
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.util.files import has_weights

HEADER_KEYS = {
    "run": "run.name",
    "dataset": "data.path",
    "seed": "seed",
    "batch_groups": "schedule.rollout_batch_size",
    "group_size": "schedule.n_samples_per_prompt",
    "max_staleness": "schedule.max_staleness",
    "max_attempts": "broker.attempts",
    "min_group_size": "schedule.min_group_size",
    "max_response_tokens": "sampling.max_response_tokens",
    "support": "sampling.top_k",
    "temperature": "sampling.temperature",
}
"""Field of the journal's first record -> configuration key that determines its value; error messages name the key."""


def make_header(config: Config, prompts: PromptBook) -> RunStarted:
    """Build the first record of a run's journal from its configuration."""
    rules = ledger_rules(config)
    return RunStarted(
        config.run.name,
        prompts.fingerprint,
        config.seed,
        rules.batch_groups,
        rules.group_size,
        rules.max_staleness,
        rules.max_attempts,
        rules.min_group_size,
        rules.max_response_tokens,
        config.sampling.is_cut,
        config.sampling.temperature,
        fingerprints(config, prompts),
    )


def check_header(recorded: RunStarted, wanted: RunStarted) -> None:
    """Compare the settings in the journal's first record (`recorded`) with those of the configuration (`wanted`).
    Raises JournalError if one has changed; the error names each changed key with both values."""
    changed = [
        f"key {key!r} was {getattr(recorded, field)!r} and is {getattr(wanted, field)!r} now"
        for field, key in HEADER_KEYS.items()
        if getattr(recorded, field) != getattr(wanted, field)
    ]
    changed += [
        f"key {key!r} was {was!r} and is {wanted.fingerprints[key]!r} now"
        for key, was in recorded.fingerprints.items()
        if was != NO_FINGERPRINT and wanted.fingerprints.get(key, was) != was
    ]
    if changed:
        raise JournalError(
            f"run {recorded.run} belongs to another run's configuration: {'; '.join(changed)}; go on with what it was "
            "begun with, or choose another run.name"
        )


# --- fingerprints -----------------------------------------------------------------------------------------------------


NO_FINGERPRINT = "none"
"""Fingerprint of something that the configuration does not set; it may be added later in the run."""
WHOLE_WEIGHTS_BYTES = 64 << 20
"""Weights of at most this many bytes are read completely for their fingerprint."""
SAMPLED_TENSORS, SAMPLE_BYTES = 1024, 4096
"""For the fingerprint of more than `WHOLE_WEIGHTS_BYTES` of weights: most tensors of which something is read, and
number of bytes read from the middle of each."""
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
    """Fingerprints of the contents that configuration keys refer to (files, prompts, settings of scoring), and commits
    of repositories from a hub, by key. The weights' fingerprint is missing if they are not on this machine."""
    found = model_fingerprints(config, prompts.tokenizer) | {
        "agent.chat_template": fingerprint_of_json(config.agent.chat_template),
        "data.eval_path (prompts)": NO_FINGERPRINT,
        "evaluation.sets (names)": ", ".join(config.evaluation.sets) or NO_FINGERPRINT,
        "environment.name": config.environment.name,
        "algorithm.hint": config.algorithm.hint or NO_FINGERPRINT,
    }
    for number in range(len(config.data.prompt_sources)):  # a partial response may be longer than a new budget
        found[f"data.sources.{number}.max_response_tokens"] = str(response_budget(config, number))
    for number, held_out in prompts.held_out.items():
        key = f"{held_out.settings.key}.path (prompts)" if number else "data.eval_path (prompts)"
        found[key] = held_out.rows.fingerprint if len(held_out.rows) else NO_FINGERPRINT
    parts = {name: part.written() for name, part in config.reward.part.items()}
    found["reward.part"] = json.dumps(parts, sort_keys=True)
    found |= {f"reward.{key}": str(getattr(config.reward, key)) for key in SCORING_KEYS}
    return found | config.commits


def model_fingerprints(config: Config, tokenizer: Tokenizer) -> dict[str, str]:
    """Fingerprints of the start model's configuration, tokeniser, chat template and weights, and the template's options
    as text, by key. The weights' fingerprint is missing if they are not on this machine."""
    folder, ends = config.model.path, sorted(tokenizer.eos_token_ids)
    tokenizer_bytes = [(folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()]
    found = {
        "model.path (config.json)": fingerprint_of_bytes(canonical_json(folder / "config.json")),
        "model.path (tokeniser)": fingerprint_of_bytes(
            *tokenizer_bytes, canonical_json(folder / "tokenizer_config.json"), str(ends).encode()
        ),
        "model.path (chat template)": fingerprint_of_json(tokenizer.inner.chat_template),
        "data.template_options": json.dumps(config.data.template_options, sort_keys=True),
    }
    weights = weights_fingerprint(folder)
    return found | ({"model.path (weights)": weights} if weights else {})


def canonical_json(path: Path) -> bytes:
    """Content of a JSON file, without the `IGNORED_KEYS` and with sorted keys, so that equal contents are equal bytes;
    empty if there is no such file. Raises ConfigError."""
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
    """A tensor's entry in the JSON header of a safetensors file; all fields keep their defaults for the entry
    `__metadata__`, which is no tensor."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] | None = None


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, located by its offset and size."""

    name: str
    kind: str
    """Data type and shape of the tensor as one text, such as "BF16 [2, 3]"."""
    path: Path
    start: int
    """Offset of the tensor's data in the file, bytes."""
    size: int
    """Size of the tensor's data, bytes."""
    shape: list[int]


def weights_fingerprint(folder: Path) -> str:
    """Fingerprint of the tensors in a folder's safetensors files, independent of sharding; empty if any of the files is
    missing.

    It covers all names, types and shapes, and the values: all of them or, of large weights, a sample. Raises
    ConfigError.
    """
    if not has_weights(folder):
        return ""
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
