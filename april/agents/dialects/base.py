"""The interface of an HTTP API: parsing requests, and rendering answers as one body or as a stream of events.

Parameters that would change the sampling distribution are refused, or ignored and counted, as `agent.overrides` says.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from april.agents.conversation_tree import ConversationTree, PolicyCall, Refusal, Turn
from april.data.messages import BadMessages
from april.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Body = dict[str, Any]


class StreamEvent(NamedTuple):
    """A server-sent event: JSON data and the event's name, "" for none."""

    data: Body
    name: str = ""


class Dialect:
    """One HTTP API; subclasses parse its requests and render its answers."""

    path: ClassVar[str]
    """URL path of the API's requests."""
    neutral_values: ClassVar[dict[str, tuple[Any, ...]]]
    """For each request parameter, the values that do not change the sampling distribution."""
    numbers_events: ClassVar[bool] = False
    """Whether the events of a stream carry sequence numbers."""
    stream_terminator: ClassVar[bytes] = b""
    """Bytes after the last event of a stream."""

    def __init__(self, tokenizer: Tokenizer, model: str, ignore_overrides: bool):
        """`model`: name of the model that responses give. `ignore_overrides`: ignore parameters that would change the
        distribution instead of refusing them."""
        self.tokenizer = tokenizer
        self.model = model
        self.ignore_overrides = ignore_overrides
        self.ignored: Counter[str] = Counter()
        """Name of a parameter -> number of requests in which the parameter was ignored."""

    # --- implemented by each API ----------------------------------------------------------------------------

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        """The session key in a request's headers; "" without one."""
        raise NotImplementedError

    def parse(self, body: Body, session: ConversationTree) -> PolicyCall:
        """The call of the policy that a request asks for: its messages, tools, limits and stop tokens. Raises Refusal
        and BadMessages."""
        raise NotImplementedError

    def response_body(self, session: ConversationTree, turn: Turn) -> Body:
        """The response body of a complete turn."""
        raise NotImplementedError

    def stream_start(self, session: ConversationTree, turn: Turn) -> list[StreamEvent]:
        """The events before the first text of a stream."""
        raise NotImplementedError

    def stream_delta(self, session: ConversationTree, turn: Turn, text: str) -> StreamEvent:
        """The event that appends `text` to the stream."""
        raise NotImplementedError

    def stream_end(self, session: ConversationTree, turn: Turn, body: Body, streamed: bool) -> list[StreamEvent]:
        """The events after the last text. `body`: the request's; `streamed`: whether any text was sent."""
        raise NotImplementedError

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        """The response body of an error. `code`: machine-readable reason; `text`: the reason as a sentence; `status`:
        HTTP status of the response."""
        raise NotImplementedError

    # --- shared by all APIs ---------------------------------------------------------------------------------

    def check(self, body: Body, session: ConversationTree) -> None:
        """Refuse or ignore parameters that would change the sampling distribution. Raises Refusal.

        On held-out prompts any temperature is accepted and has no effect, since evaluation has its own."""
        own = {} if session.lease.evaluation else {"temperature": (session.lease.temperature,)}
        for key, values in (self.neutral_values | own).items():
            if body.get(key) is None or body[key] in values:
                continue
            if not self.ignore_overrides:
                raise Refusal(
                    "unsupported_parameter",
                    f"{key!r} = {body[key]!r} would have tokens drawn from another distribution than the run trains "
                    f"on; leave it out, or set agent.overrides = 'ignore' (this run: {values[0]!r})",
                )
            self._ignore(key, body[key])

    def _ignore(self, key: str, value: Any) -> None:
        if not self.ignored[key]:
            log.warning("%r = %r is ignored here and from now on, as agent.overrides says", key, value)
        self.ignored[key] += 1

    def messages(self, body: Body) -> list[Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadMessages("'messages' is a list of at least one message")
        return messages

    def max_tokens(self, body: Body, *keys: str) -> int | None:
        """The token limit of the turn, from the first of the keys that is set; None without one. Raises Refusal."""
        key = next((key for key in keys if body.get(key) is not None), None)
        if key is None:
            return None
        max_tokens = body[key]
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise Refusal("invalid_value", f"{key!r} = {max_tokens!r} is no number of tokens; give 1 or more")
        return max_tokens

    def stop_token_ids(self, key: str, stop: Any) -> tuple[int, ...]:
        """Token ids of the stop texts, each of which has to be one token. `key`: the request parameter; `stop`: its
        value, a text or a list. Raises Refusal."""
        ids = set[int]()
        for text in [stop] if isinstance(stop, str) else stop or []:
            tokens = self.tokenizer.encode_prompt(text).tolist() if isinstance(text, str) else []
            if len(tokens) == 1:
                ids.update(tokens)
            elif self.ignore_overrides and len(tokens) > 1:
                self._ignore(key, text)
            else:
                raise Refusal(
                    "invalid_value",
                    f"{key!r} = {text!r} is not one token of this policy; name a text that is one, or set "
                    "agent.overrides = 'ignore'",
                )
        return tuple(sorted(ids))


def turn_name(session: ConversationTree, turn: Turn) -> str:
    """Identifier of a turn, the same in every process and execution."""
    return f"{session.lease.group}-{session.lease.index}-{turn.fork}-{turn.index}"


def tool_calls_of(session: ConversationTree, turn: Turn) -> list[tuple[str, str, Any]]:
    """(id, name, arguments) of the tool calls in an answer."""
    calls = session.answer(turn).get("tool_calls", [])
    name = turn_name(session, turn)
    functions = [call["function"] for call in calls]
    return [
        (f"call_{name}-{index}", function["name"], function["arguments"]) for index, function in enumerate(functions)
    ]
