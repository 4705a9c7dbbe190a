"""Dataset rows: what a record must have to become one, by the mapping that locates its fields."""

import re
from collections.abc import Collection, Iterable
from decimal import Decimal
from typing import Any

import msgspec
import orjson

from april.config.data import COLUMN_SEPARATOR, MAPPING_PARTS, Mapping, dotted_prefixes
from april.util.errors import ConfigError
from april.util.registry import registry_of
from april.util.text import GROUP_REWARD, takes_row_prompt

LABEL_CHARACTERS = 200_000
"""Largest number of characters that a label may have; a label is sent with every sample of its prompt."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Message roles that chat templates know; most templates silently drop others."""
MISSING = object()
NO_NUMBERS = ("nan", "inf", "-inf")


class BadRow(ValueError):
    """Raised for a record that is not a valid row; the text says what is wrong, the caller adds the location."""


class RowImage(msgspec.Struct, array_like=True, frozen=True):
    """An image of a dataset row, before its preparation: the path of its file, or where the dataset stores its
    bytes."""

    source: str
    """sha256 of the bytes in hex."""
    path: str = ""
    """Path of the file; "" for bytes that the dataset keeps."""
    start: int = 0
    size: int = 0
    """If `path` is "", the image is the `size` bytes from offset `start` on in the file in which the dataset stores its
    images."""


class DatasetRow(msgspec.Struct, array_like=True, frozen=True):
    """One dataset row: prompt, label and verifier of a record."""

    prompt: str | list[dict]
    """Text, or chat messages with `role` and `content`."""
    label: str
    """Reference answer, which the verifier compares with a response."""
    reward: str | None = None
    """Name of the verifier that scores responses to this row; None: the run's default verifier."""
    images: tuple[RowImage, ...] = ()
    """Images of the prompt in order; a part of a message names each by its `source`."""
    tools: tuple[dict, ...] = ()
    """JSON schemas of the tools that the chat template prints."""
    hint: str = ""
    """The row's own text for the field {hint} of `algorithm.hint`, the prompt of self-distillation."""


def make_row(
    record: Any,
    mapping: Mapping,
    reward: str | None = None,
    prompt_as: str = "given",
    allowed: Collection[str] = (),
) -> DatasetRow:
    """Convert a record to a dataset row. `reward`: verifier that overrides the record's; `prompt_as`: "chat" makes a
    text a user message, "text" joins messages to one text, and "given" keeps messages and lets the mapping decide on a
    text; `allowed`: verifiers that a record may name; empty: the shipped ones.

    Raises BadRow.
    """
    if not isinstance(record, dict):
        raise BadRow(f"{excerpt(record)} is not a JSON object; write an object with prompt and label")
    prompt_key, prompt = find_field(record, mapping.prompt, "data.prompt_key")
    label_key, label = find_field(record, mapping.label, "data.label_key")
    own = None if reward else checked_reward(record.get("reward"), allowed)
    return DatasetRow(
        prompt=shaped_prompt(checked_prompt(prompt, prompt_key), mapping, prompt_as),
        label=answer_in(checked_label(label, label_key), label_key, mapping),
        reward=reward or own or mapping.reward,
        hint=checked_hint(record, mapping.hint) if mapping.hint else "",
    )


def find_field(record: dict, keys: tuple[str, ...], setting: str) -> tuple[str, Any]:
    """(key, value) of the first of `keys` that the record has. A key that names several columns gives a dictionary, by
    the last part of each column's name, or by the whole name if last parts are equal. `setting`: configuration key that
    the error names. Raises BadRow."""
    for key in keys:
        columns = [key.strip()] if key in record else [column.strip() for column in key.split(COLUMN_SEPARATOR)]
        names = [column.rpartition(".")[2] for column in columns]
        values = {
            name if names.count(name) == 1 else column: value_at(record, column)
            for name, column in zip(names, columns, strict=True)
        }
        if MISSING not in values.values():
            return key, values if len(columns) > 1 else values.popitem()[1]
    wanted = " or ".join(map(repr, keys))
    there = ", ".join(map(repr, record)) or "none"
    raise BadRow(f"key {wanted} is missing (keys there: {there}); add it or name another with --{setting}")


def value_at(record: Any, key: str) -> Any:
    """The value at a key like `conversations.0.value`, a path through objects and lists; MISSING if there is none. If
    fields have dots in their names, the longest name that fits is taken."""
    if isinstance(record, list):
        part, _, rest = key.partition(".")
        found = record[int(part)] if part.isdecimal() and int(part) < len(record) else MISSING
        return value_at(found, rest) if rest and found is not MISSING else found
    if not isinstance(record, dict):
        return MISSING
    for name in dotted_prefixes(key):
        if name in record:
            rest = key[len(name) + 1 :]
            return value_at(record[name], rest) if rest else record[name]
    return MISSING


def mapped(record: Any, name: str) -> Any:
    """Convert a record by the user's own mapping `name` to one with prompt and label. Raises BadRow, also for any
    exception that the mapping raises."""
    try:
        found = MAPPING_PARTS.find(name)(record)
    except ConfigError:
        raise
    except Exception as error:
        raise BadRow(f"mapping {name!r} raised {type(error).__name__}: {error}; mend it, or the row") from error
    if not isinstance(found, dict):
        raise BadRow(f"mapping {name!r} returned {excerpt(found)}; return a dictionary with prompt and label")
    return found


def checked_prompt(prompt: Any, key: str) -> str | list[dict]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            check_message(message, key)
        if any(text_of(message).strip() for message in prompt) or any(map(has_other_parts, prompt)):
            return prompt
    raise BadRow(
        f"key {key!r} = {excerpt(prompt)} is no prompt; give text or "
        'chat messages like [{"role": "user", "content": "..."}]'
    )


def check_message(message: Any, key: str) -> None:
    """Raises BadRow unless the message has a known role and content that a chat template can render. `key`: field of
    the record that has the message, for the error."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise BadRow(
            f'key {key!r} has {excerpt(message)}, which is no message like {{"role": "user", "content": "..."}}'
        )
    if message["role"] not in ROLES:
        raise BadRow(f"key {key!r} has a message of role {excerpt(message['role'])}; use one of {', '.join(ROLES)}")
    content = message["content"]
    parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
        raise BadRow(
            f"key {key!r} has a message whose content is {excerpt(content)}; give text, or a list of typed parts"
        )


def text_of(message: dict) -> str:
    """Text of a message, without its non-text parts."""
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def row_prompt(row: DatasetRow, rewards: Iterable[str]) -> str:
    """The row's prompt (text or messages) as JSON if one of the verifiers named in `rewards` takes it in this form,
    besides the rendered text; otherwise ""."""
    return orjson.dumps(row.prompt).decode() if row.prompt and any(map(takes_row_prompt, rewards)) else ""


def has_other_parts(message: dict) -> bool:
    """Whether a message has non-text parts, such as images."""
    content = message["content"]
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def shaped_prompt(prompt: str | list[dict], mapping: Mapping, prompt_as: str) -> str | list[dict]:
    """The prompt as text or as messages, as `prompt_as` says (given | chat | text): the mapping's template is put
    around a text, and messages are joined if text is asked for. Raises BadRow."""
    if isinstance(prompt, list):
        if prompt_as == "text" and any(map(has_other_parts, prompt)):
            raise BadRow(f"{excerpt(prompt)} has parts that are no text, which data.prompt_as = 'text' would lose")
        return "\n\n".join(map(text_of, prompt)) if prompt_as == "text" else prompt
    prompt = mapping.template.replace("{prompt}", prompt)
    chat = mapping.chat if prompt_as == "given" else prompt_as == "chat"
    return [{"role": "user", "content": prompt}] if chat else prompt


def checked_label(label: Any, key: str) -> str:
    """The label as text; several columns become a JSON object. `key`: label key of the record. Raises BadRow."""
    if isinstance(label, dict) and COLUMN_SEPARATOR in key:
        label = orjson.dumps(label, default=float).decode()
    if isinstance(label, str):
        if len(label) > LABEL_CHARACTERS:
            raise BadRow(f"key {key!r} has {len(label)} characters, more than {LABEL_CHARACTERS}; shorten the label")
        return label
    if isinstance(label, Decimal):
        return format(label, "f")
    if isinstance(label, int | float) and not isinstance(label, bool) and str(label) not in NO_NUMBERS:
        return str(label)
    raise BadRow(f"key {key!r} = {excerpt(label)} is no reference answer; give text or a number")


def checked_hint(record: dict, key: str) -> str:
    _, hint = find_field(record, (key,), "data.hint_key")
    if not isinstance(hint, str):
        raise BadRow(f"key {key!r} = {excerpt(hint)} is no hint; give text")
    return hint


PLACEHOLDER = re.compile(r"\{(label|hint|feedback)\}")
"""Regular expression for the fields of `algorithm.hint` other than {prompt}."""


def hinted_prompt(row: DatasetRow, template: str, feedback: str = "") -> str | list[dict]:
    """Put a row's prompt, and the `feedback` on a response, into `template` (`algorithm.hint`); in a chat only the
    user's last message goes into it. Raises BadRow for a chat without a user's message."""
    fields = {"label": row.label, "hint": row.hint, "feedback": feedback}
    before, after = (PLACEHOLDER.sub(lambda found: fields[found[1]], part) for part in template.split("{prompt}"))
    if isinstance(row.prompt, str):
        return f"{before}{row.prompt}{after}"
    last = max((place for place, each in enumerate(row.prompt) if each["role"] == "user"), default=None)
    if last is None:
        raise BadRow(f"{excerpt(row.prompt)} has no message of a user, into which algorithm.hint goes; add one")
    said = {**row.prompt[last], "content": f"{before}{text_of(row.prompt[last])}{after}"}
    return [*row.prompt[:last], said, *row.prompt[last + 1 :]]


def answer_in(label: str, key: str, mapping: Mapping) -> str:
    """The label, or the answer that the mapping extracts from it. `key`: label key of the record. Raises BadRow."""
    answer = mapping.answer_of(label) if mapping.answer_of else label
    if answer is None:
        raise BadRow(
            f"key {key!r} ends in {label[-60:]!r} and has no answer like {mapping.answer_form!r}; "
            "write it behind the solution, or name another key with --data.label_key"
        )
    return answer


def checked_reward(reward: Any, allowed: Collection[str]) -> str | None:
    """The verifier that a record names, if the run allows it: data must not choose which code runs. Raises BadRow."""
    if reward is None:
        return None
    if not isinstance(reward, str) or not reward:
        raise BadRow(f"key 'reward' = {excerpt(reward)} names no verifier; give its name or leave the key out")
    if not may_name(reward, allowed):
        raise BadRow(
            f"key 'reward' = {excerpt(reward)} is not among the verifiers that rows may name "
            f"({', '.join(allowed or registry_of('reward.name').shipped)}); "
            "add it to reward.allowed, or leave the key out"
        )
    return reward


def may_name(reward: str, allowed: Collection[str]) -> bool:
    """Whether rows may name this verifier. `allowed`: the key reward.allowed; empty: the shipped verifiers."""
    return reward in allowed if allowed else reward.removeprefix(GROUP_REWARD) in registry_of("reward.name").shipped


def excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
