"""The tokeniser of a policy folder: encodes prompts, and decodes responses for verifiers. Needs no torch."""

import json
import os
import sys
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from april.config import ConfigError
from april.data.images import ImageRule, read_json
from april.data.messages import canonical, check_distinct, check_printed, texts_of, with_text_arguments
from april.data.rows import BadRow, excerpt
from april.util.errors import refuse
from april.util.text import first_line

NO_TOKEN = -1
"""An id that no token has."""


class Tokenizer:
    def __init__(self, path: str | Path):
        """Read the tokeniser of a local Hugging Face folder. Raises ConfigError if there is none."""
        from transformers import AutoTokenizer

        try:
            self.inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            if len(self.inner) <= len(set(self.inner.all_special_tokens)):
                raise ValueError("its vocabulary is empty")
            ends = generation_eos_ids(Path(path)) | tokenizer_eos_ids(self.inner)
        except Exception as error:  # what transformers raises of a folder's files has no bounds
            refuse(
                "model.path",
                path,
                f"has no tokeniser that transformers can read ({first_line(error)})",
                "give a Hugging Face folder with its tokeniser's files",
            )
        self.path = Path(path)
        self._text_arguments: dict[str, bool] = {}
        """Chat template -> whether it takes the arguments of tool calls as text."""
        self._fast = getattr(self.inner, "backend_tokenizer", None)
        """The underlying Rust tokeniser, if there is one; called directly because the transformers wrapper is slow."""
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self.eos_token_ids = frozenset(ends)
        self.end_of_text = next(iter(tokenizer_eos_ids(self.inner) or sorted(self.eos_token_ids)), 0)
        """The tokeniser's end-of-sequence id; without one, the lowest id at which the policy stops generating, or 0."""

    def encode_prompt(
        self,
        prompt: str | list[dict],
        options: dict[str, Any] | None = None,
        continues: bool = True,
        bos: bool | None = False,
    ) -> np.ndarray:
        """Token ids of a prompt, int32 [P]. Chat messages go through the chat template, with `options`.

        `continues`: a final assistant message is continued by the response, not closed. `bos`: whether text begins with
        the beginning-of-sequence token; None: as transformers does by default. Raises BadRow for messages that the
        template refuses or does not print.
        """
        if isinstance(prompt, str):
            return np.asarray([*self._prefix(bos), *self._encode(prompt)], np.int32)
        return np.asarray(self._encode(self._render(prompt, options or {}, continues)), np.int32)

    def encode_row(self, prompt: str | list[dict], images: Sequence[int] = (), **options: Any) -> np.ndarray:
        """Token ids of the prompt of a dataset row or a trainer, int32 [P]; `options`: those of `encode_prompt`.

        `images`: number of tokens of each image of the prompt, in order; each image's placeholder is repeated as often.
        Raises BadRow, also for a token that the model has no embedding for.
        """
        return self.known(self._expanded(self.encode_prompt(prompt, **options), images), prompt)

    def known(self, ids: np.ndarray, of: Any) -> np.ndarray:
        """Check token ids, int32 [P], and return them unchanged. Raises BadRow for an id that the model has no
        embedding for; `of`: the prompt, for the error."""
        if self._embeddings and len(ids) and (beyond := int(ids.max())) >= self._embeddings:
            raise BadRow(
                f"token {self.inner.convert_ids_to_tokens(beyond)!r} of {excerpt(of)} has id {beyond}, and the "
                f"model only {self._embeddings} embeddings: resize the model, or take the tokeniser that belongs to it"
            )
        return ids

    def _expanded(self, ids: np.ndarray, images: Sequence[int]) -> np.ndarray:
        """Token ids in which each image's placeholder token is repeated, once for each token of the image. `images`:
        number of tokens of each image, in order. Raises BadRow unless `ids` has one placeholder for each image."""
        is_image = ids == self._config.get("image_token_id", NO_TOKEN)
        if (found := int(is_image.sum())) != len(images):
            raise BadRow(
                f"the prompt has {len(images)} images, and its text {found} placeholders of images; the chat template "
                "has to print one for each, and a text may contain none"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[is_image] = images
        return np.repeat(ids, repeats)

    @cached_property
    def _config(self) -> dict[str, Any]:
        """Content of the config.json in the tokeniser's folder; {} without such a file."""
        return read_json(self.path / "config.json")

    @cached_property
    def image_rule(self) -> ImageRule | None:
        """Rule by which the policy takes images; None if it takes none. Raises ConfigError for an image processor that
        April does not know."""
        return ImageRule.of(self.path)

    @cached_property
    def _embeddings(self) -> int:
        """Number of token embeddings of the folder's model; 0 if unknown."""
        config = self._config
        return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0)

    def _render(self, messages: list[dict], options: dict[str, Any], continues: bool) -> str:
        if not self.inner.chat_template:
            raise ConfigError(f"tokeniser of {str(self.path)!r} has no chat template; give prompts as text or add one")
        from jinja2 import TemplateError

        try:
            plain = [canonical(message, str(self.inner.chat_template), with_images=True) for message in messages]
            if (
                any(not isinstance(message["content"], str) for message in plain)
                and "image_token_id" not in self._config
            ):
                raise BadRow(f"the prompt has images, and the policy of {str(self.path)!r} takes none")
            ends_open = continues and plain[-1]["role"] == "assistant" and "".join(texts_of(plain[-1])).strip() != ""

            def render(messages: list[dict]) -> str:
                return self.print_chat(
                    messages, add_generation_prompt=not ends_open, continue_final_message=ends_open, **options
                )

            printed = render(plain)
            check_printed(plain, printed)
            check_distinct(plain, str(self.inner.chat_template), render)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRow(f"the chat template refuses {excerpt(messages)} ({first_line(error)})") from None
        return printed

    def print_chat(self, messages: list[dict], chat_template: str | None = None, **options: Any) -> str:
        """Text of canonical messages in the chat template, by default the tokeniser's own. `options`: those of
        `apply_chat_template`."""
        plain = self.for_template(messages, chat_template)
        return str(self.inner.apply_chat_template(plain, chat_template=chat_template, tokenize=False, **options))

    def for_template(self, messages: list[dict], template: str | None = None) -> list[dict]:
        """Canonical messages with the arguments of tool calls in the form that the chat template takes: as JSON text or
        as objects. `template`: None for the tokeniser's own."""
        has_calls = any("tool_calls" in message for message in messages)
        return with_text_arguments(messages) if has_calls and self._takes_text_arguments(template) else messages

    def _takes_text_arguments(self, template: str | None) -> bool:
        """Whether a chat template prints the arguments of tool calls as JSON only if they are given as JSON text, not
        as objects. `template`: None for the tokeniser's own."""

        def printed(arguments: Any) -> str:
            call = {"type": "function", "function": {"name": "try", "arguments": arguments}}
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                return str(self.inner.apply_chat_template(turns, chat_template=template, tokenize=False))
            except Exception:  # what templates raise has no bounds
                return ""

        if (source := template or str(self.inner.chat_template)) not in self._text_arguments:
            decoded, text = printed({"key": 1}), printed('{"key": 1}')
            self._text_arguments[source] = '{"key": 1}' in text and (not decoded or "{'key': 1}" in decoded)
        return self._text_arguments[source]

    def _prefix(self, bos: bool | None) -> list[int]:
        """Ids that are put before a text prompt. `bos`: whether that is the beginning-of-sequence token; None: as
        transformers does by default."""
        if bos is None:
            return self._default_prefix
        if bos and self.inner.bos_token_id is None:
            refuse("data.add_bos", bos, f"finds no such token in the tokeniser of {self.path}", "leave it out")
        return [self.inner.bos_token_id] if bos else []

    @cached_property
    def _default_prefix(self) -> list[int]:
        """Ids that transformers puts before a text by default."""
        text, plain = self.inner.encode("a"), self._encode("a")
        begins = next((at for at in range(len(text)) if text[at : at + len(plain)] == plain), 0)
        return text[:begins]

    def _encode(self, text: str) -> list[int]:
        if self._fast is not None:  # of its functions, those of batches let other threads run
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids, keep_special: bool = False) -> str:
        """Text of the ids, without special tokens unless `keep_special`; spaces are not cleaned up."""
        listed = np.asarray(ids, np.int64).tolist()
        if self._fast is not None:
            return self._fast.decode(listed, skip_special_tokens=not keep_special)
        return self.inner.decode(listed, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)

    def response_text(self, ids, keep_special: bool = True, stops: Collection[int] = ()) -> str:
        """Text of a response, or of a turn of one, as verifiers and environments get it.

        `keep_special`: with special tokens, except end tokens and padding at its end. `stops`: further ids at which
        responses end. Such an id is an end token if the chat template writes it, or if the folder names no end token;
        another one, such as a closing tag, belongs to the text.
        """
        if not keep_special:
            return self.decode(ids)
        template = str(self.inner.chat_template or "")
        ends = {stop for stop in stops if not self.eos_token_ids or self.decode([stop], keep_special=True) in template}
        ends |= self.eos_token_ids | {self.inner.pad_token_id}
        listed = np.asarray(ids, np.int64).tolist()
        while listed and listed[-1] in ends:
            listed.pop()
        return self.decode(listed, keep_special=True)


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
    """Ids at which transformers ends a generation: those of `generation_config.json`, or else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        ids = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return set()


def recommended_sampling(path: Path) -> dict[str, float]:
    """Those of temperature, top_p and top_k that a folder's `generation_config.json` sets for sampling with
    transformers."""
    file = path / "generation_config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    named = {key: config.get(key) for key in ("temperature", "top_p", "top_k")} if config.get("do_sample") else {}
    return {key: value for key, value in named.items() if value is not None}
