"""Conversations for supervised training: a dataset row becomes token ids, and which of them are the assistant's.

The tokens of a row are those of its text as a whole, as the chat template prints it. The assistant's are what the
policy would have to sample: what follows the prompt of its turn, up to and including the token that ends the turn. A
template that marks them ({% generation %}) is believed. Of any other the beginnings of the conversation are printed and
tokenised, and have to be beginnings of the whole: a row of which that is not so is refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from april.config import DataSection, SourceSection
from april.config.data import Mapping
from april.config.sft import SftSection
from april.data.dataset import Dataset, add_rows, given_record, mapping_of
from april.data.messages import Message, canonical, check_printed
from april.data.rows import MISSING, BadRow, DatasetRow, checked_prompt, excerpt, find_field, has_other_parts, value_at
from april.data.tokenizer import Tokenizer
from april.util.text import first_line

# --- rows -------------------------------------------------------------------------------------------------------------

CONVERSATION_KEYS = ("messages", "conversation")
"""Fields of a whole conversation, looked for before those of the mapping's prompt."""
ANSWER_KEYS = ("completion", "response")
"""Fields of an answer, looked for before those of the mapping's label."""


def load_conversations(
    sources: list[SourceSection], data: DataSection, section: SftSection, limit: int | None = None
) -> Dataset:
    """Read all sources, or the first `limit` rows of each, as conversations. Raises ConfigError for an unreadable or
    empty source, or a bad row if `data.bad_rows` is "stop"."""
    dataset = Dataset(data.shuffle)
    for source in sources:
        mapping = conversation_mapping(source)
        columns = mapping.columns | {section.tools_key} if mapping.columns else set()
        make = maker_of_rows(source, mapping, data.prompt_as, section.tools_key)
        add_rows(dataset, source, data, limit, columns, make)
    return dataset


def conversation_mapping(source: SourceSection) -> Mapping:
    """The source's mapping, with the fields of conversations and of whole answers before its own."""
    mapping = mapping_of(source)
    return replace(
        mapping,
        prompt=mapping.prompt if source.prompt_key else (*CONVERSATION_KEYS, *mapping.prompt),
        label=mapping.label if source.label_key else (*ANSWER_KEYS, *mapping.label),
    )


def maker_of_rows(
    source: SourceSection, mapping: Mapping, prompt_as: str, tools_key: str
) -> Callable[[Any], DatasetRow]:
    """A function that makes the row of a record: a list of messages that ends with the assistant's, or a prompt and the
    answer to it. It raises BadRow."""

    def make(record: Any) -> DatasetRow:
        record = given_record(record, source)
        if not isinstance(record, dict):
            raise BadRow(f"{excerpt(record)} is not a JSON object; write an object with messages")
        key, prompt = find_field(record, mapping.prompt, "data.prompt_key")
        prompt, tools = checked_prompt(prompt, key), tools_of(value_at(record, tools_key), tools_key)
        if isinstance(prompt, list) and any(map(has_other_parts, prompt)):
            raise BadRow(f"key {key!r} has images, which `april sft` does not train on; leave the row out")
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            return DatasetRow(prompt, "", tools=tools)
        answer_key, answer = find_field(record, mapping.label, "data.label_key")
        if not isinstance(answer, str) or not answer.strip():
            raise BadRow(f"key {answer_key!r} = {excerpt(answer)} is no answer to train on; give text")
        if isinstance(prompt, list):
            return DatasetRow([*prompt, {"role": "assistant", "content": answer}], "", tools=tools)
        prompt = mapping.template.replace("{prompt}", prompt)
        if prompt_as == "chat" or (prompt_as == "given" and mapping.chat):
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return DatasetRow(said, "", tools=tools)
        return DatasetRow(prompt, answer)

    return make


def tools_of(given: Any, key: str) -> tuple[dict, ...]:
    """The tools of a record, as JSON schemas. Raises BadRow."""
    if isinstance(given, str) and given.strip():
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError:
            raise BadRow(f"key {key!r} = {excerpt(given)} is not JSON; give a list of JSON schemas") from None
    if given is MISSING or not given:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise BadRow(f"key {key!r} = {excerpt(given)} is no list of JSON schemas, such as of functions; give one")
    return tuple(given)


# --- tokens -----------------------------------------------------------------------------------------------------------

MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Regular expression for what marks the assistant's tokens in a chat template, for transformers."""
STAND_INS = "\u25a0\u25a1\u25b2\u25b3\u25cf\u25cb"
"""Characters of which one takes the place of a message's text, to find where that is printed."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """The T tokens of a row."""

    tokens: np.ndarray
    """Token ids, int32 [T]."""
    is_trained: np.ndarray
    """Whether each token is trained, bool [T]."""


class ConversationEncoder:
    """Makes token ids of rows.

    encoder = ConversationEncoder(tokenizer, config.data, config.sft)
    encoder.encode(row)                     # raises BadRow
    """

    def __init__(self, tokenizer: Tokenizer, data: DataSection, section: SftSection):
        self.tokenizer, self.options, self.bos = tokenizer, data.template_options, data.add_bos
        self.trains_all = section.train_on == "all"

    def encode(self, row: DatasetRow) -> Conversation:
        """The tokens of a row. Raises BadRow for a row that trains nothing, and for one that the chat template refuses,
        or does not print in full, or of which it is not certain which tokens are the assistant's."""
        if isinstance(row.prompt, str):
            prompt = self.tokenizer.encode_prompt(row.prompt, bos=self.bos)
            answer = [*self.tokenizer.encode_prompt(row.label), self.tokenizer.end_of_text]
            ids, is_trained = [*prompt, *answer], np.arange(len(prompt) + len(answer)) >= len(prompt)
        else:
            ids, is_trained = self._encode_chat(row)
        tokens = self.tokenizer.known(np.asarray(ids, np.int32), row.prompt)
        is_trained = is_trained | self.trains_all
        is_trained[:1] = False  # nothing comes before it from which it could be predicted
        if not is_trained.any():
            raise BadRow(f"{excerpt(row.prompt)} has no token to train; give a text or message of the assistant's")
        return Conversation(tokens, is_trained)

    def _encode_chat(self, row: DatasetRow) -> tuple[list[int], np.ndarray]:
        from jinja2 import TemplateError

        assert isinstance(row.prompt, list)
        if not any(message["role"] == "assistant" for message in row.prompt):
            raise BadRow(f"{excerpt(row.prompt)} has no message of the assistant's, so that nothing would be trained")
        try:
            messages = [canonical(message, self._template) for message in row.prompt]
            text = self._print(messages, row)
            check_printed(messages, text)
            if self._marks_assistant:
                return self._marked(messages, row)
            ids = self.tokenizer.encode_prompt(text).tolist()
            return ids, self._found(messages, row, text, ids)
        except (TemplateError, TypeError, ValueError) as error:
            if isinstance(error, BadRow):
                raise
            raise BadRow(f"the chat template refuses {excerpt(row.prompt)} ({first_line(error)})") from None

    @cached_property
    def _template(self) -> str:
        template = self.tokenizer.inner.chat_template
        if not template:
            raise BadRow(
                f"the tokeniser of {str(self.tokenizer.path)!r} has no chat template; add one, or give a prompt and "
                "an answer as texts"
            )
        return str(template)

    @cached_property
    def _marks_assistant(self) -> bool:
        return bool(MARKS_ASSISTANT.search(self._template))

    def _print(self, messages: list[Message], row: DatasetRow, is_open: bool = False) -> str:
        """The text of messages; `is_open`: with the prompt of the assistant's next turn."""
        return self.tokenizer.inner.apply_chat_template(
            messages, tools=list(row.tools) or None, tokenize=False, add_generation_prompt=is_open, **self.options
        )

    def _marked(self, messages: list[Message], row: DatasetRow) -> tuple[list[int], np.ndarray]:
        """Ids, and which are the assistant's by the marks in the template."""
        found = self.tokenizer.inner.apply_chat_template(
            messages, tools=list(row.tools) or None, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, **self.options,
        )  # fmt: skip
        return found["input_ids"], np.asarray(found["assistant_masks"], bool)

    def _found(self, messages: list[Message], row: DatasetRow, text: str, ids: list[int]) -> np.ndarray:
        """Which of the ids are the assistant's, bool [T], by where its messages begin and end in the text."""
        is_trained = np.zeros(len(ids), bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = messages[:number], messages[: number + 1]
            begin = self._where(text, before, row, True) or self._where_changed(text, messages, number, row)
            is_last = number + 1 == len(messages)
            certain_end = len(text) if is_last else self._where(text, after, row, False)
            end = certain_end or self._where_changed(text, messages, number + 1, row)
            first, is_boundary = self._tokens_before(text[:begin], ids)
            stop, ends_there = self._tokens_before(text[:end], ids)
            ends = [at for at in range(first, stop) if ids[at] in self.tokenizer.eos_token_ids]
            if begin == 0 or not is_boundary or first >= stop or not (ends or (certain_end and ends_there)):
                raise BadRow(
                    f"the chat template does not print message {number} (role 'assistant') alike with and without what "
                    "follows, or in tokens of its own, so that it is not certain which tokens are its; leave the row "
                    "out, or mark them in the template with {% generation %}"
                )
            is_trained[first : ends[-1] + 1 if ends else stop] = True
        return is_trained

    def _where(self, text: str, messages: list[Message], row: DatasetRow, is_open: bool) -> int:
        """Number of characters of `text` that messages at its beginning print; 0 if they print something else."""
        try:
            printed = self._print(messages, row, is_open)
        except Exception:  # a template may refuse a conversation without its end
            return 0
        return len(printed) if text.startswith(printed) else 0

    def _where_changed(self, text: str, messages: list[Message], number: int, row: DatasetRow) -> int:
        """Number of characters of `text` before that of message `number`; 0 if it has no text of its own."""
        stand_in = next((mark for mark in STAND_INS if mark not in text), "")
        if not stand_in or not messages[number]["content"]:
            return 0
        changed = {**messages[number], "content": stand_in}
        printed = self._print([*messages[:number], changed, *messages[number + 1 :]], row)
        return alike(text, printed)

    def _tokens_before(self, beginning: str, ids: list[int]) -> tuple[int, bool]:
        """Number of first `ids` that the beginning of their text has too, and whether it has no others."""
        found = self.tokenizer.encode_prompt(beginning).tolist()
        count = alike(found, ids)
        return count, count == len(found)


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of first elements in which two texts or lists agree."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
