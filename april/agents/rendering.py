"""Messages to tokens: what is new of a conversation is rendered, what was said keeps the tokens that it was said in.

Messages are compared as values, not as they are written: roles, texts, and what tools are called with.
"""

import hashlib
from typing import Any

import msgspec
import numpy as np

from april.data.tokenizer import Tokenizer

Message = dict[str, Any]
SAID = "\ue000said\ue000"
"""stands for what the policy has said, where a template is asked for what follows it"""
DIGEST_BYTES = 16
TEXTS = ("text", "input_text", "output_text")
"""types of a content's parts"""


class BadMessages(ValueError):
    """Messages that are none, or that the chat template refuses; the text says why."""


class Renderer:
    """renderer = Renderer(tokenizer, template="", options={})

    renderer.begin(messages, tools)                       # int32 [T]: the prompt of the first turn
    renderer.go_on(before, new, tools, ended_by="<|im_end|>")     # what follows the policy's answer to `before`
    """

    def __init__(self, tokenizer: Tokenizer, template: str, options: dict[str, Any], response_template: dict[str, Any]):
        """`template`, `response_template`: in place of the tokeniser's own; `options`: for the first."""
        self.tokenizer = tokenizer
        self.template = template or None
        self.options = options
        self.response_template = response_template or getattr(tokenizer.inner, "response_template", None)

    def begin(self, messages: list[Message], tools: list[Any] | None) -> np.ndarray:
        return self._encode(self._render(messages, tools))

    def go_on(self, before: list[Message], new: list[Message], tools: list[Any] | None, last: int) -> np.ndarray:
        """`last`: the token that the policy's answer ends with; the template's end of a message is not said twice."""
        text = self._render([*before, {"role": "assistant", "content": SAID}, *new], tools)
        behind = text.rpartition(SAID)[2]
        ending = self.written([last])
        if last in self.tokenizer.eos_token_ids and behind.startswith(ending):
            behind = behind[len(ending) :]
        return self._encode(behind)

    @property
    def parses(self) -> bool:
        """Whether answers are more than a text: calls of tools, thoughts."""
        return self.response_template is not None

    def parse(self, text: str, opening: str) -> Message:
        """An answer as a message. What cannot be parsed is a text: the agent says what is wrong with it."""
        message: Message = {"role": "assistant", "content": text}
        if not self.parses:
            return message
        try:
            found = self.tokenizer.inner.parse_response(text, self.response_template, prefix=opening)
            message["content"] = text_of(found.get("content"))
            calls = [tool_call(call) for call in found.get("tool_calls") or []]
        except (ValueError, TypeError):
            return {"role": "assistant", "content": text}
        return message | ({"tool_calls": calls} if calls else {})

    def written(self, ids: Any) -> str:
        """Text of the ids, special tokens included."""
        return self.tokenizer.inner.decode(ids, skip_special_tokens=False)

    def _render(self, messages: list[Message], tools: list[Any] | None) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.inner.apply_chat_template(
                messages, tools=tools or None, chat_template=self.template, add_generation_prompt=True, tokenize=False,
                **self.options,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError) as error:
            raise BadMessages(f"the chat template refuses these messages: {error}") from None

    def _encode(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_prompt(text)


def same_form(message: Any) -> Message:
    """A message as the template is given it and as it is compared. Raises BadMessages."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadMessages("a message is an object with a role")
    formed: Message = {"role": "system" if message["role"] == "developer" else message["role"]}
    formed["content"] = text_of(message.get("content"))
    if calls := message.get("tool_calls"):
        formed["tool_calls"] = [tool_call(call) for call in calls]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            formed[key] = message[key]
    return formed


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in TEXTS for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadMessages("a message's content is text; images and sounds are not supported")


def tool_call(call: Any) -> Message:
    """With its arguments as a value, however they were written; its id is the client's."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments or "{}")
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, msgspec.DecodeError):
        raise BadMessages("a tool call has a function with a name, and arguments as JSON") from None


def digest(messages: list[Message], tools: list[Any] | None, rest: Any) -> bytes:
    """The key of a request: of equal ones, it is equal."""
    encoded = msgspec.json.encode([messages, tools or None, rest], order="sorted")
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()
