"""Conversations for supervised training: a dataset row becomes token ids and a mask of the assistant's tokens.

A row's text, as the chat template prints it, is tokenised as a whole. The assistant's tokens are those that the policy
would have to sample: from the end of its turn's prompt up to and including the token that ends the turn. If the
template marks them ({% generation %}), the marks are used. Otherwise each beginning of the conversation is printed and
tokenised, and has to be a prefix of the whole. A row in which the assistant's tokens are not certain is refused.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import orjson

from april.config import DataSection, SourceSection
from april.config.data import Mapping
from april.config.learner import SftSection
from april.data.dataset import Dataset, add_rows, given_record, mapping_of
from april.data.messages import BadMessages, Message, canonical, check_distinct, check_printed
from april.data.rows import MISSING, BadRow, DatasetRow, checked_prompt, excerpt, find_field, has_other_parts, value_at
from april.data.tokenizer import Tokenizer
from april.util.text import first_line

# --- rows -------------------------------------------------------------------------------------------------------------

CONVERSATION_KEYS = ("messages", "conversation")
"""Record fields that hold a whole conversation; they are tried before the mapping's prompt fields."""
ANSWER_KEYS = ("completion", "response")
"""Record fields that hold the answer to train on; they are tried before the mapping's label fields."""


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
    """The source's mapping, with `CONVERSATION_KEYS` and `ANSWER_KEYS` tried before its own prompt and label fields."""
    mapping = mapping_of(source)
    return replace(
        mapping,
        prompt=mapping.prompt if source.prompt_key else (*CONVERSATION_KEYS, *mapping.prompt),
        label=mapping.label if source.label_key else (*ANSWER_KEYS, *mapping.label),
    )


def maker_of_rows(
    source: SourceSection, mapping: Mapping, prompt_as: str, tools_key: str
) -> Callable[[Any], DatasetRow]:
    """Create the function that converts a record to a row: messages of which the last is the assistant's, or a prompt
    and its answer as texts. `prompt_as`: whether a text and its answer become messages: "chat": yes, "text": no,
    "given": as the mapping says. `tools_key`: field with the tools. The created function raises BadRow."""

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
    """The tools of a record, as JSON schemas. `given`: a list of them or its JSON text; `key`: the field, for errors.
    Raises BadRow."""
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
"""Regular expression for the tag with which a chat template marks the assistant's tokens for transformers."""
STAND_INS = "\u25a0\u25a1\u25b2\u25b3\u25cf\u25cb"
"""One of these characters, which the conversation lacks, replaces a message's text, to find out where the template
prints that text."""


NOTHING: Message = {"role": "user", "content": ""}


@dataclass(frozen=True, eq=False)
class Conversation:
    """The T tokens of a row."""

    tokens: np.ndarray
    """Token ids, int32 [T]."""
    is_trained: np.ndarray
    """Whether each token is trained, bool [T]."""


class ConversationEncoder:
    """Converts dataset rows to token ids and training masks.

    encoder = ConversationEncoder(tokenizer, config.data, config.sft)
    encoder.encode(row)                     # raises BadRow
    """

    def __init__(self, tokenizer: Tokenizer, data: DataSection, section: SftSection):
        self.tokenizer, self.options, self.bos = tokenizer, data.template_options, data.add_bos
        self.trains_all = section.train_on == "all"

    def encode(self, row: DatasetRow) -> Conversation:
        """The tokens of a row. Raises BadRow for a row without trained tokens, and for one that the chat template
        refuses or does not print in full, or in which the assistant's tokens cannot be told for certain."""
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
            check_distinct(messages, self._template, lambda changed: self._print(changed, row))
            if self._marks_assistant:
                return self._marked(messages, row)
            return self._found(messages, row, text)
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
        """Text of `messages` in the chat template, with the tools of `row`. `is_open`: add the prompt of the
        assistant's next turn."""
        return self.tokenizer.print_chat(
            messages, tools=list(row.tools) or None, add_generation_prompt=is_open, **self.options
        )

    def _marked(self, messages: list[Message], row: DatasetRow) -> tuple[list[int], np.ndarray]:
        """(token ids [T], whether each is trained: bool [T]), by the marks of a template that marks the assistant's
        tokens."""
        found = self.tokenizer.inner.apply_chat_template(
            self.tokenizer.for_template(messages), tools=list(row.tools) or None, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, **self.options,
        )  # fmt: skip
        return found["input_ids"], np.asarray(found["assistant_masks"], bool)

    def _found(self, messages: list[Message], row: DatasetRow, text: str) -> tuple[list[int], np.ndarray]:
        """(token ids [T], whether each is trained: bool [T]), for a template without marks: by the characters at which
        the assistant's messages begin and end in `text`, the printed conversation."""
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [self._begin(text, messages, number, row) for number in numbers]
        ids, places = self._tokens(text, begins, numbers)
        is_trained, ends_turn = np.zeros(len(ids), bool), self.tokenizer.eos_token_ids
        for number, (origin, skipped, first) in zip(numbers, places, strict=True):
            is_last = number + 1 == len(messages)
            certain = len(text) if is_last else self._where(text, messages[: number + 1], row, False)
            end = certain or self._where_changed(text, messages, number + 1, row)
            stop, ends_there = self._tokens_of(text[origin:end], ids[skipped:])
            stop += skipped
            # the end token may be that of the next role, which stands behind the message
            ends = [at for at in range(first, min(stop + (certain > 0), len(ids))) if ids[at] in ends_turn]
            stop = ends[0] + 1 if ends else stop
            if not (ends or (certain and ends_there)) or not self._says(ids[first:stop], messages[number]):
                raise uncertain(number)
            is_trained[first:stop] = True
        return ids, is_trained

    def _tokens(self, text: str, begins: list[int], numbers: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Tokenise `text`, in which the assistant's turns (messages `numbers`) begin at characters `begins`. Returns
        the ids and, for each turn, (offset of a character, index of the token that begins there, index of the turn's
        first token). From that character and token on, the caller looks for the end of the turn.

        The text is tokenised as a whole if each turn begins at a token boundary. Otherwise it is cut at the turns and
        tokenised piece by piece, as it is when the policy samples turns.
        """
        ids = self.tokenizer.encode_prompt(text).tolist()
        found = [self._tokens_of(text[:begin], ids) for begin in begins]
        if all(is_boundary for _, is_boundary in found):
            return ids, [(0, 0, first) for first, _ in found]
        pieces = [self.tokenizer.encode_prompt(text[a:b]).tolist() for a, b in pairwise([0, *begins, len(text)])]
        ids = [each for piece in pieces for each in piece]
        if sorted(begins) != begins or self.tokenizer.decode(ids, keep_special=True) != text:
            raise uncertain(numbers[0])
        firsts = list(accumulate(map(len, pieces)))
        return ids, [(begin, first, first) for begin, first in zip(begins, firsts, strict=False)]

    def _says(self, ids: list[int], message: Message) -> bool:
        """Whether the tokens `ids` decode to the text of a message, white space and the message's thoughts left out."""
        try:
            check_printed([message, NOTHING], self.tokenizer.decode(ids, keep_special=True))
        except BadMessages:
            return False
        return True

    def _begin(self, text: str, messages: list[Message], number: int, row: DatasetRow) -> int:
        """Offset in `text`, characters, at which the assistant's message `number` begins. Raises BadRow if it is not
        certain."""
        prompted = self._where(text, messages[:number], row, True)
        if begin := prompted or self._where_changed(text, messages, number, row):
            return begin
        raise uncertain(number)

    def _where(self, text: str, messages: list[Message], row: DatasetRow, is_open: bool) -> int:
        """Number of characters that `messages`, the first ones of the conversation, print as, if `text` begins with
        these characters; otherwise 0. `is_open`: whether the prompt of the assistant's next turn is printed, too."""
        try:
            printed = self._print(messages, row, is_open)
        except Exception:  # a template may refuse a conversation without its end
            return 0
        return len(printed) if text.startswith(printed) else 0

    def _where_changed(self, text: str, messages: list[Message], number: int, row: DatasetRow) -> int:
        """Offset in `text`, characters, at which it changes when the content of message `number` is replaced; 0 if the
        whole text stays the same."""
        stand_in = next((mark for mark in STAND_INS if mark not in text), "")
        changed = {**messages[number], "content": stand_in}
        printed = self._print([*messages[:number], changed, *messages[number + 1 :]], row)
        return alike(text, printed) if stand_in and printed != text else 0

    def _tokens_of(self, beginning: str, ids: list[int]) -> tuple[int, bool]:
        """Tokenise `beginning`, the first part of the text that `ids` encode. Returns (number of leading ids that its
        tokens and `ids` have in common, whether these are all tokens of `beginning`)."""
        found = self.tokenizer.encode_prompt(beginning).tolist()
        count = alike(found, ids)
        return count, count == len(found)


def uncertain(number: int) -> BadRow:
    """The error for a row in which the tokens of message `number` cannot be told for certain."""
    return BadRow(
        f"the chat template does not print message {number} (role 'assistant') alike with and without what follows, or "
        "the tokeniser joins it with what is around it, so that it is not certain which tokens are its; leave the row "
        "out, or mark them in the template with {% generation %}"
    )


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix of two texts or lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
