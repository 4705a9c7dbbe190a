"""The tokeniser of a policy folder: encodes prompts, and decodes responses for verifiers. Needs no torch."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from april.config import ConfigError
from april.data.rows import BadRow, excerpt
from april.util.errors import refuse


class Tokenizer:
    def __init__(self, path: str | Path):
        """Read the tokeniser of a local Hugging Face folder. Raises ConfigError if there is none."""
        from transformers import AutoTokenizer

        try:
            self.inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            if len(self.inner) <= len(set(self.inner.all_special_tokens)):
                raise ValueError("its vocabulary is empty")
        except (OSError, ValueError) as error:
            refuse(
                "model.path",
                path,
                f"has no tokeniser that transformers can read ({first_line(error)})",
                "give a Hugging Face folder with its tokeniser's files",
            )
        self.path = Path(path)
        self._fast = getattr(self.inner, "backend_tokenizer", None)
        """The underlying Rust tokeniser, if there is one; called directly because the transformers wrapper is slow."""
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self.eos_token_ids = frozenset(generation_eos_ids(self.path) | tokenizer_eos_ids(self.inner))
        self.end_of_text = next(iter(tokenizer_eos_ids(self.inner) or sorted(self.eos_token_ids)), 0)
        """The tokeniser's end-of-sequence id; without one, another id that the policy stops at."""

    def encode_prompt(self, prompt: str | list[dict], options: dict[str, Any] | None = None) -> np.ndarray:
        """int32 [P]: ids of a prompt. Text gets no special tokens; chat messages go through the chat template with
        `options`. Raises BadRow for messages that the template refuses."""
        if isinstance(prompt, str):
            return np.asarray(self._encode(prompt), np.int32)
        if not self.inner.chat_template:
            raise ConfigError(f"tokeniser of {str(self.path)!r} has no chat template; give prompts as text or add one")
        from jinja2 import TemplateError

        try:
            ids = self.inner.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **(options or {})
            )
        except (TemplateError, TypeError) as error:
            raise BadRow(f"the chat template refuses {excerpt(prompt)} ({first_line(error)})") from None
        return np.asarray(ids, np.int32)

    def _encode(self, text: str) -> list[int]:
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids) -> str:
        """Text of the ids without special tokens; spaces are not cleaned up."""
        listed = np.asarray(ids, np.int64).tolist()
        if self._fast is not None:
            return self._fast.decode(listed, skip_special_tokens=True)
        return self.inner.decode(listed, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def import_without_torch() -> None:
    """Import transformers while torch is hidden from it, which takes a third of the time. For processes that use only
    its tokenisers; does nothing if torch or transformers is already imported."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    hidden: dict[str, Any] = {"torch": None}
    sys.modules |= hidden
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def tokenizer_eos_ids(inner) -> set[int]:
    return set() if inner.eos_token_id is None else {inner.eos_token_id}


def generation_eos_ids(path: Path) -> set[int]:
    file = path / "generation_config.json"
    if not file.is_file():
        return set()
    ids = orjson.loads(file.read_bytes()).get("eos_token_id")
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
