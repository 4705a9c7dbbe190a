"""Dataset rows, the mappings that locate their fields in a record, the checks of a record, and sampling supports."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import orjson

from april.util.registry import registry_of

# --- numbers in an answer ---------------------------------------------------------------------------------------------

ANSWER_MARK = "####"
AROUND = r"[ \t$€£*\\]*+"
"""Regular expression for what may surround a number: spaces, currency signs and the asterisks of bold text."""
DIGITS = r"(?>[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)"
LEADING_NUMBER = re.compile(rf"{AROUND}([-+−]?){AROUND}({DIGITS})(?![ \t]*+[/^][ \t]*+[0-9])")
ANY_NUMBER = re.compile(rf"([-−]?)({DIGITS})")


def final_number(text: str) -> str | None:
    """The number after the last `####` that a number follows, written like `-1080.5`; None if there is none."""
    numbers = map(leading_number, reversed(text.split(ANSWER_MARK)[1:]))
    return next(filter(None, numbers), None)


def leading_number(text: str) -> str | None:
    """The number at the start of a text, written like `-1080.5`; None if there is none."""
    found = LEADING_NUMBER.match(text)
    return plain_number(*found.groups()) if found else None


def last_number(text: str) -> str | None:
    """The last number in a text, written like `-1080.5`; None if there is none."""
    found = ANY_NUMBER.findall(text)
    return plain_number(*found[-1]) if found else None


def plain_number(sign: str, digits: str) -> str:
    return ("-" if sign in ("-", "−") else "") + digits.replace(",", "")


# --- rows -------------------------------------------------------------------------------------------------------------

LABEL_CHARACTERS = 200_000
"""Longest label (characters); a label is sent with every sample of its prompt."""
GROUP_REWARD = "group:"
"""Prefix of the name of a reward that scores all responses of a prompt together."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Message roles that chat templates know; most templates silently drop others."""
COLUMN_SEPARATOR = ","
"""Separator in a label key that lists several columns; the label is then a JSON object."""
MISSING = object()
NO_NUMBERS = ("nan", "inf", "-inf")


class BadRow(ValueError):
    """Raised for a record that is not a valid row; the text says what is wrong, the caller adds the location."""


class DatasetRow(msgspec.Struct, array_like=True, frozen=True):
    """One dataset row: prompt, label and verifier of a record."""

    prompt: str | list[dict]
    """Text, or chat messages with `role` and `content`."""
    label: str
    """Reference answer, which the verifier compares with a response."""
    reward: str | None = None
    """Name of the verifier that scores responses to this row; None: the run's default verifier."""


@dataclass(frozen=True)
class Mapping:
    """Locates the fields of a row in a record. A key may name a nested field, such as `reward_model.ground_truth`."""

    prompt: tuple[str, ...] = ("prompt",)
    """Candidate keys of the prompt; the first one in the record is used."""
    label: tuple[str, ...] = ("label",)
    """Candidate keys of the label; the first one in the record is used."""
    reward: str | None = None
    """Name of the verifier for records that name none; None: the run's default verifier."""
    chat: bool = False
    """Whether a text prompt becomes a user message."""
    template: str = "{prompt}"
    """Template around a text prompt, applied before it becomes a message."""
    answer_of: Callable[[str], str | None] | None = None
    """Extracts the reference answer from a label that is a whole solution; returns None if there is none."""
    answer_form: str = ""
    """Example of the ending that `answer_of` looks for, for the error message."""

    @property
    def columns(self) -> set[str]:
        """Top-level fields of a record that may be read."""
        labels = [key.strip() for label in self.label for key in label.split(COLUMN_SEPARATOR)]
        return {key.partition(".")[0] for key in (*self.prompt, *labels)} | {"reward"}


BOXED = "{prompt}\n\nReason step by step, and put the final answer into \\boxed{}."
MARKED = (
    "{prompt}\n\nReason step by step, and end with the final answer on a line of its own: "
    "#### and then the number alone."
)

MAPPINGS = {
    "plain": Mapping(),
    "dapo_math": Mapping(label=("reward_model.ground_truth", "label"), reward="dapo"),
    "deepscaler": Mapping(("problem",), ("answer",), reward="deepscaler", chat=True, template=BOXED),
    "deepmath": Mapping(("question",), ("final_answer",), reward="math", chat=True, template=BOXED),
    "aime": Mapping(("problem", "Problem"), ("answer", "Answer"), reward="math", chat=True, template=BOXED),
    "gsm8k": Mapping(
        ("question",), ("answer",), reward="gsm8k", chat=True, template=MARKED,
        answer_of=final_number, answer_form="#### 42",
    ),
}  # fmt: skip
"""Fields of published datasets:

    dapo_math    BytedTsinghua-SIA/DAPO-Math-17k: prompt [{role, content}], reward_model {ground_truth, style}
    deepscaler   agentica-org/DeepScaleR-Preview-Dataset: problem, answer, solution
    deepmath     zwhe99/DeepMath-103K: question, final_answer, difficulty, topic, r1_solution_1 .. 3
    aime         HuggingFaceH4/aime_2024 (problem, answer) and Maxwell-Jia/AIME_2024 (Problem, Answer)
    gsm8k        openai/gsm8k, and github.com/openai/grade-school-math: question, answer (a solution, then #### 42)
"""


def make_row(
    record: Any,
    mapping: Mapping,
    reward: str | None = None,
    prompt_as: str = "given",
    allowed: Collection[str] = (),
) -> DatasetRow:
    """Convert a record to a dataset row. `reward`: verifier that overrides the record's; `prompt_as`: given | chat |
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
    )


def find_field(record: dict, keys: tuple[str, ...], setting: str) -> tuple[str, Any]:
    """(key, value) of the first key in the record. `setting`: configuration key named in the error. Raises BadRow."""
    for key in keys:
        columns_of_key = key.split(COLUMN_SEPARATOR)
        values = {column.rpartition(".")[2]: value_at(record, column) for column in map(str.strip, columns_of_key)}
        if MISSING not in values.values():
            return key, values if len(columns_of_key) > 1 else values.popitem()[1]
    wanted = " or ".join(map(repr, keys))
    there = ", ".join(map(repr, record)) or "none"
    raise BadRow(f"key {wanted} is missing (keys there: {there}); add it or name another with --{setting}")


def value_at(record: dict, key: str) -> Any:
    value: Any = record
    for part in key.split("."):
        value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
    return value


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
    """Raises BadRow unless the message has a known role and content that a chat template can render."""
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


def has_other_parts(message: dict) -> bool:
    """Whether a message has non-text parts, such as images."""
    content = message["content"]
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def shaped_prompt(prompt: str | list[dict], mapping: Mapping, prompt_as: str) -> str | list[dict]:
    """The prompt with its template applied, as text or as messages; messages are joined if text is asked for."""
    if isinstance(prompt, list):
        return "\n\n".join(map(text_of, prompt)) if prompt_as == "text" else prompt
    prompt = mapping.template.replace("{prompt}", prompt)
    chat = mapping.chat if prompt_as == "given" else prompt_as == "chat"
    return [{"role": "user", "content": prompt}] if chat else prompt


def checked_label(label: Any, key: str) -> str:
    """The label as text; several columns become a JSON object."""
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


def answer_in(label: str, key: str, mapping: Mapping) -> str:
    """The label, or the answer that the mapping extracts from it."""
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
    shipped = registry_of("reward.name").shipped
    if reward not in allowed if allowed else reward.removeprefix(GROUP_REWARD) not in shipped:
        raise BadRow(
            f"key 'reward' = {excerpt(reward)} is not among the verifiers that rows may name "
            f"({', '.join(allowed or shipped)}); add it to reward.allowed, or leave the key out"
        )
    return reward


def excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- sampling supports ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Support:
    """Supports of T tokens, the token ids that each was drawn from, as a ragged array."""

    counts: np.ndarray
    """int32 [T]: size of each token's support; 0 for a token that was not sampled."""
    ids: np.ndarray
    """int32 [sum of counts]: the ids of all supports, concatenated."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Support":
        """Supports from each token's ids, int32; at least one token."""
        return cls(np.fromiter(map(len, rows), np.int32, len(rows)), np.concatenate(rows))

    @classmethod
    def none(cls, tokens: int) -> "Support":
        """Empty supports of `tokens` tokens."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))

    def fits(self, tokens: int) -> bool:
        """Whether counts and ids are consistent, and there are `tokens` counts."""
        return len(self.counts) == tokens and not (self.counts < 0).any() and self.counts.sum() == len(self.ids)

    def holds(self, tokens: np.ndarray) -> bool:
        """Whether every token, int32 [T], is in its support."""
        fits = self.fits(len(tokens)) and (self.counts > 0).all()
        return bool(fits and (self.indices_of(tokens) < self.counts).all())

    def indices_of(self, tokens: np.ndarray) -> np.ndarray:
        """int64 [T]: index of each token in its support; at least the support's size if absent. No support is empty."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        found = self.ids == np.repeat(tokens, self.counts)
        at = np.where(found, np.arange(len(self.ids)), len(self.ids))
        return np.minimum.reduceat(at, starts) - starts
