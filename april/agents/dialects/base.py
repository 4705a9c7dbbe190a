"""What the gateway asks of an API: what a request wishes, and how an answer is written, whole or in pieces.

What would have tokens drawn from another distribution than the run trains on is refused, or ignored and counted:
`agent.overrides`.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from april.agents.rendering import BadMessages
from april.agents.session import AgentSession, Refusal, Turn, Wish
from april.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Body = dict[str, Any]


class Event(NamedTuple):
    """Of a stream."""

    data: Body
    name: str = ""


class Dialect:
    path: ClassVar[str]
    """of the API's requests"""
    neutral: ClassVar[dict[str, tuple[Any, ...]]]
    """what may be said of a parameter without a consequence, beside nothing"""
    numbered: ClassVar[bool] = False
    """whether the events of a stream have numbers"""
    farewell: ClassVar[bytes] = b""
    """behind the last event of a stream"""

    def __init__(self, tokenizer: Tokenizer, model: str, ignores: bool):
        """`ignores`: what would change the distribution is ignored; otherwise it is refused."""
        self.tokenizer = tokenizer
        self.model = model
        self.ignores = ignores
        self.ignored: Counter[str] = Counter()
        """requests that named what was ignored, by its name"""

    # --- of each API ------------------------------------------------------------------------------------------

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        """That a request shows."""
        raise NotImplementedError

    def wish(self, body: Body, session: AgentSession) -> Wish:
        """Raises Refusal and BadMessages."""
        raise NotImplementedError

    def whole(self, session: AgentSession, turn: Turn) -> Body:
        """The answer, once its turn is over."""
        raise NotImplementedError

    def begin(self, session: AgentSession, turn: Turn) -> list[Event]:
        """Of a stream, before there is any text."""
        raise NotImplementedError

    def more(self, session: AgentSession, turn: Turn, text: str) -> Event:
        """Text behind what was sent before."""
        raise NotImplementedError

    def end(self, session: AgentSession, turn: Turn, body: Body, streamed: bool) -> list[Event]:
        """Of the stream for a request; `streamed`: some text was sent."""
        raise NotImplementedError

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        raise NotImplementedError

    # --- of all -----------------------------------------------------------------------------------------------

    def check(self, body: Body, session: AgentSession) -> None:
        """Raises Refusal for what would change the distribution, unless it is ignored; held-out prompts have a
        temperature of their own, whatever a program asks for."""
        own = {} if session.told.evaluation else {"temperature": (session.told.temperature,)}
        for key, values in (self.neutral | own).items():
            if body.get(key) is None or body[key] in values:
                continue
            if not self.ignores:
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

    def most(self, body: Body, *keys: str) -> int | None:
        """Tokens of the turn, under the first of the keys that is there."""
        key = next((key for key in keys if body.get(key) is not None), None)
        if key is None:
            return None
        most = body[key]
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise Refusal("invalid_value", f"{key!r} = {most!r} is no number of tokens; give 1 or more")
        return most

    def stops(self, key: str, stop: Any) -> tuple[int, ...]:
        """Token ids of the texts that end a turn."""
        ids = set[int]()
        for text in [stop] if isinstance(stop, str) else stop or []:
            tokens = self.tokenizer.encode_prompt(text).tolist() if isinstance(text, str) else []
            if len(tokens) == 1:
                ids.update(tokens)
            elif self.ignores and len(tokens) > 1:
                self._ignore(key, text)
            else:
                raise Refusal(
                    "invalid_value",
                    f"{key!r} = {text!r} is not one token of this policy; name a text that is one, or set "
                    "agent.overrides = 'ignore'",
                )
        return tuple(sorted(ids))


def name_of(session: AgentSession, turn: Turn) -> str:
    """The same whoever answers, and whenever."""
    return f"{session.told.group}-{session.told.index}-{turn.branch}-{turn.place}"


def calls_of(session: AgentSession, turn: Turn) -> list[tuple[str, str, Any]]:
    """(id, name, arguments) of the tools that the policy has called."""
    calls = session.answer(turn).get("tool_calls", [])
    name = name_of(session, turn)
    functions = [call["function"] for call in calls]
    return [(f"call_{name}-{place}", one["name"], one["arguments"]) for place, one in enumerate(functions)]
