"""Converts messages to tokens: the chat template renders new messages, and earlier answers keep their sampled tokens.

Messages are compared by value (role, text, tool-call arguments), not by their JSON spelling.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from april.config import Config
from april.data.messages import BadMessages, Message, text_of, tool_call
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer

ANSWER_MARK = "\ue000said\ue000"
"""Placeholder for the policy's answer, by which the text after it is found in a rendered template."""
DIGEST_BYTES = 16


class Renderer:
    """Renders conversations to token ids, and parses answers to messages.

    renderer.render_prompt(messages, tools)                          # int32 [T]: prompt of the first turn
    renderer.render_continuation(before, new, tools, last_token)     # int32 [T]: what follows the answer to `before`

    Argument `images` of both: for each image in the rendered messages, in order, the number of tokens that it takes.
    """

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer) -> "Renderer":
        """The renderer of a run's agent sessions."""
        agent = config.agent
        return cls(tokenizer, agent.chat_template, config.data.template_options, agent.response_template)

    def __init__(self, tokenizer: Tokenizer, template: str, options: dict[str, Any], response_template: dict[str, Any]):
        """`template`, `response_template`: used instead of the tokenizer's own; `options`: variables of `template`."""
        self.tokenizer = tokenizer
        self.template = template or None
        self.options = options
        self.response_template = response_template or getattr(tokenizer.inner, "response_template", None)

    def render_prompt(self, messages: list[Message], tools: list[Any] | None, images: Sequence[int] = ()) -> np.ndarray:
        return self._encode(self._render(messages, tools), images)

    def render_continuation(
        self, before: list[Message], new: list[Message], tools: list[Any] | None, last_token: int,
        images: Sequence[int] = (),
    ) -> np.ndarray:  # fmt: skip
        """Token ids, int32 [T], between the policy's answer to `before` and its next answer. `last_token`: last token
        of the answer; if it is the token with which the template ends a message, it is not repeated. `images`: number
        of tokens of each image in `new`."""
        text = self._render([*before, {"role": "assistant", "content": ANSWER_MARK}, *new], tools)
        rest = text.rpartition(ANSWER_MARK)[2]
        ending = self.decode_raw([last_token])
        if last_token in self.tokenizer.eos_token_ids and rest.startswith(ending):
            rest = rest[len(ending) :]
        return self._encode(rest, images)

    @property
    def parses(self) -> bool:
        """Whether answers are parsed into text, tool calls and thoughts."""
        return self.response_template is not None

    def parse(self, text: str, before: np.ndarray) -> Message:
        """The answer as an assistant message. An answer that cannot be parsed becomes plain text, for the agent to
        reject.

        `before`: ids before the answer, which may open a section that the answer continues, such as its thoughts."""
        message: Message = {"role": "assistant", "content": text}
        if not self.parses:
            return message
        try:
            prefix = self.decode_raw(before)
            found = self.tokenizer.inner.parse_response(text, self.response_template, prefix=prefix)
            message["content"] = text_of(found.get("content"))
            calls = [tool_call(call) for call in found.get("tool_calls") or []]
        except (ValueError, TypeError, RecursionError):
            return {"role": "assistant", "content": text}
        return message | ({"tool_calls": calls} if calls else {})

    def decode_raw(self, ids: Any) -> str:
        """Text of the ids, including special tokens."""
        return self.tokenizer.decode(ids, keep_special=True)

    def _render(self, messages: list[Message], tools: list[Any] | None) -> str:
        try:
            return self.tokenizer.print_chat(
                messages, self.template, tools=tools or None, add_generation_prompt=True, **self.options
            )
        except Exception as error:  # a template is the model's own program: it may fail in any way
            raise BadMessages(f"the chat template refuses these messages: {type(error).__name__}: {error}") from None

    def _encode(self, text: str, images: Sequence[int]) -> np.ndarray:
        try:
            return self.tokenizer.encode_row(text, images)
        except BadRow as error:
            raise BadMessages(str(error)) from None


def request_key(messages: list[Message], tools: list[Any] | None, rest: Any) -> bytes:
    """Hash by which equal requests are recognised, DIGEST_BYTES long. `rest`: what else must be equal, such as the
    token limit."""
    encoded = msgspec.json.encode([messages, tools or None, rest], order="sorted")
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()
