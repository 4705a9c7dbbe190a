"""Prompts as they come from a JSONL file, and the order in which an epoch hands them out."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from april.config import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a dataset."""

    prompt: str | list[dict]
    """text, or chat messages with `role` and `content`"""
    label: str
    """reference answer"""
    reward: str | None = None
    """name of its verifier; None: the run's"""


def load_rows(path: str | Path, prompt_key: str = "prompt", label_key: str = "label") -> list[Row]:
    """Read every row of a JSONL file; blank lines are skipped. Raises ConfigError for the first bad one."""
    rows = []
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(parse_row(line, f"{path}, line {number}", prompt_key, label_key))
    except OSError as error:
        raise ConfigError(f"dataset {path} cannot be read ({error}); give a readable JSONL file") from None
    if not rows:
        raise ConfigError(f"dataset {path} has no rows; write one JSON object with prompt and label on each line")
    return rows


def parse_row(line: bytes, where: str, prompt_key: str, label_key: str) -> Row:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: {excerpt(line)} is not JSON ({error}); write one JSON object on each line"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {excerpt(row)} is not a JSON object; write an object with prompt and label")
    return Row(
        prompt=checked_prompt(required(row, prompt_key, "data.prompt_key", where), prompt_key, where),
        label=checked_label(required(row, label_key, "data.label_key", where), label_key, where),
        reward=checked_reward(row.get("reward"), where),
    )


def required(row: dict, key: str, setting: str, where: str) -> Any:
    if key not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise ConfigError(
            f"{where}: key {key!r} is missing (keys there: {keys}); add it or name another with --{setting}"
        )
    return row[key]


def checked_prompt(prompt: Any, key: str, where: str) -> str | list[dict]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(is_message(message) for message in prompt):
        return prompt
    raise ConfigError(
        f"{where}: key {key!r} = {excerpt(prompt)} is no prompt; give text or "
        'chat messages like [{"role": "user", "content": "..."}]'
    )


def is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def checked_label(label: Any, key: str, where: str) -> str:
    if isinstance(label, str):
        return label
    if isinstance(label, int | float) and not isinstance(label, bool):
        return str(label)
    raise ConfigError(f"{where}: key {key!r} = {excerpt(label)} is no reference answer; give text or a number")


def checked_reward(reward: Any, where: str) -> str | None:
    if reward is None or (isinstance(reward, str) and reward):
        return reward
    raise ConfigError(
        f"{where}: key 'reward' = {excerpt(reward)} names no verifier; give its name or leave the key out"
    )


def excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def fingerprint(path: str | Path) -> str:
    """sha256 of the file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [count]: row indices in the order of this epoch, the same wherever and whenever it is asked for."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)
