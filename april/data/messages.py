"""Chat messages: their canonical form, and the check that a chat template prints all of their content.

Dataset rows and the calls of agents have messages in many formats. Chat templates print only some: text in a list of
parts, or under a role that the template does not know, vanishes without an error.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

Message = dict[str, Any]
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of content parts that are text."""
IMAGE = "image"
"""Type of content parts that are images, in canonical messages."""
ALIASES = {"developer": "system", "observation": "tool"}
"""Role -> the name that most chat templates have for that role. The role is renamed so unless the template contains its
own name."""
STAND_IN = "zqxjzqxj"
"""Text that replaces a message's content, to see whether the template prints the message at all; no chat template
contains it."""
PLAIN = re.compile(r"[A-Za-z0-9 ]+")
"""Regular expression for characters that JSON escapes neither once nor twice, so that they can be found in any
template's output."""
THOUGHTS = re.compile(r"(?s).*</think(?:ing)?>")
"""Regular expression for an answer's text up to the end of its thoughts, which templates drop from earlier turns."""


class BadMessages(ValueError):
    """The messages are malformed, or the chat template does not print them; the text says why."""


def canonical(message: Any, template: str = "", with_images: bool = False) -> Message:
    """A message whose content is text, whose tool calls have decoded arguments, and whose role the template knows.

    `template`: source of the chat template. `with_images`: a content with images stays a list of parts, each a text or
    an image. Fields that are None are left out. Raises BadMessages.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadMessages("a message is an object with a role")
    role = message["role"]
    found: Message = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    found["role"] = role if role in template else ALIASES.get(role, role)
    found["content"] = content_of(message.get("content")) if with_images else text_of(message.get("content"))
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [tool_call(call) for call in calls]
    return found


def normalized(message: Any) -> Message:
    """The canonical form of a message with the fields by which messages are compared. Raises BadMessages."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "name")
    found = canonical(message, with_images=True)
    return {key: found[key] for key in kept if key in found}


def content_of(content: Any) -> str | list[Message]:
    """The text of a message's content, or its texts and images as parts in order. Raises BadMessages for parts of other
    types."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") == IMAGE for part in parts):
        return text_of(content)
    return [
        {"type": IMAGE, "image": part.get("image")} if part.get("type") == IMAGE
        else {"type": "text", "text": text_of([part])}
        for part in parts
    ]  # fmt: skip


def texts_of(message: Message) -> list[str]:
    """The texts in the content of a canonical message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def image_sources(messages: list[Message]) -> list[str]:
    """Sources of the images of canonical messages, in order."""
    contents = [message["content"] for message in messages if not isinstance(message.get("content"), str)]
    return [part["image"] for content in contents for part in content or () if part["type"] == IMAGE]


def text_of(content: Any) -> str:
    """The text of a message's content. Raises BadMessages for images and other parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in TEXT_TYPES for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    raise BadMessages("a message's content is texts and, from users and tools, images; other parts are not supported")


def tool_call(call: Any) -> Message:
    """The canonical form of a tool call: arguments decoded from JSON, without the client's id. Raises BadMessages."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments or "{}")
        orjson.dumps(arguments)  # refuses what no API could give back: numbers of many digits, deep nesting
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, msgspec.DecodeError, RecursionError):
        raise BadMessages("a tool call has a function with a name, and arguments as JSON") from None


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Canonical messages with the arguments of tool calls as JSON, for templates that take them as text."""

    def as_text(call: Message) -> Message:
        function = call["function"]
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        message | {"tool_calls": [as_text(call) for call in message["tool_calls"]]} if "tool_calls" in message
        else message
        for message in messages
    ]  # fmt: skip


def check_distinct(messages: list[Message], template: str, render: Callable[[list[Message]], str]) -> None:
    """Check that the chat template prints each message whose text also occurs in the source of the template. For this
    another text is printed in the message's place, and looked for. `render`: function that prints messages in the
    template. Raises BadMessages."""
    own = _squeezed(template)
    for number, message in enumerate(messages):
        said = "".join(texts_of(message))
        if said.strip() and isinstance(message["content"], str) and _squeezed(said) in own:
            changed = [*messages[:number], {**message, "content": STAND_IN}, *messages[number + 1 :]]
            try:
                is_printed = STAND_IN in render(changed)
            except Exception:  # a template that takes no other text, such as JSON alone
                is_printed = True
            if not is_printed:
                raise BadMessages(
                    f"the chat template does not print {_excerpt(said)} of message {number} (role {message['role']!r})"
                )


def check_printed(messages: list[Message], printed: str) -> None:
    """Check that a rendered prompt contains its canonical messages: the text of each, in their order and without
    overlaps, and the names and text arguments of tool calls.

    White space is ignored. A system message may be printed at any place, and thoughts may be missing from earlier
    answers. Raises BadMessages, which names the missing message.
    """
    whole, numbered = _squeezed(printed), list(enumerate(messages))
    missing = _missing(numbered, whole, messages[-1])
    systems = [each for each in numbered if each[1]["role"] == "system"]
    if missing and systems:
        placed = [each for each in numbered if each not in systems]
        missing = _missing(placed, whole, messages[-1])
        for system in systems if not missing else ():
            orders = [[*placed[:at], system, *placed[at:]] for at in range(len(placed) + 1)]
            placed = next((each for each in orders if not _missing(each, whole, messages[-1])), [])
            if not placed:
                missing = f"{_excerpt(''.join(texts_of(system[1])))} of message {system[0]} (role 'system')"
                break
    if missing:
        raise BadMessages(f"the chat template does not print {missing}")


def _missing(numbered: list[tuple[int, Message]], whole: str, last: Message) -> str:
    """The first text that the chat template has not printed, as a noun phrase for an error: "'TEXT' of message 3 (role
    'user')"; "" if all texts are printed in their order. `numbered`: (number, message) pairs; `whole`: the printed
    prompt without white space; `last`: the last message, whose thoughts have to be printed too."""
    at = 0
    for number, message in numbered:
        start = at
        for said in _sayings(message):
            spellings = _spellings(said, keeps_thoughts=message is last or message["role"] != "assistant")
            ends = [found + len(text) for text in spellings if (found := whole.find(text, at)) >= 0]
            if not ends:
                return f"{_excerpt(said)} of message {number} (role {message['role']!r})"
            at = min(ends)
        for said in _arguments(message):
            plain = _squeezed(max(PLAIN.findall(said), key=len, default=""))
            if (found := whole.find(plain, start)) < 0:
                return f"the argument {_excerpt(said)} of message {number}"
            at = max(at, found + len(plain))
    return ""


def _sayings(message: Message) -> list[str]:
    """The texts of a message that must be printed in order: its content, and the names of the functions that it
    calls."""
    return [*texts_of(message), *(call["function"]["name"] for call in message.get("tool_calls", ()))]


def _arguments(message: Message) -> list[str]:
    """The texts in the arguments of the functions that a message calls, which templates may print in any order."""
    found: list[str] = []
    left = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        found += [value] if isinstance(value, str) else ()
    return found


def _spellings(said: str, keeps_thoughts: bool) -> list[str]:
    """Forms in which a template may print a text, without white space: as it is, as JSON, or without the thoughts.
    `keeps_thoughts`: whether thoughts have to be printed, as in the last message, so that the form without them is left
    out."""
    texts = [said] if keeps_thoughts else [said, THOUGHTS.sub("", said)]
    escaped = [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for text in texts for ascii_only in (False, True)]
    return [_squeezed(text) for text in (*texts, *escaped)]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _excerpt(said: str) -> str:
    return repr(said if len(said) <= 60 else f"{said[:57]}...")
