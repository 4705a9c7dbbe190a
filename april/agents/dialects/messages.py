"""Anthropic's Messages."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from april.agents.dialects.base import Body, Dialect, Event, calls_of, name_of
from april.agents.rendering import BadMessages, Message, same_form, text_of
from april.agents.session import AgentSession, Turn, Wish

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error"}


class Messages(Dialect):
    path = "/v1/messages"
    neutral: ClassVar = {"top_p": (1,), "top_k": (0,), "tool_choice": ({"type": "auto"}, {"type": "none"})}

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "").strip()

    def wish(self, body: Body, session: AgentSession) -> Wish:
        self.check(body, session)
        system = text_of(body.get("system"))
        messages = [{"role": "system", "content": system}] if system else []
        for message in self.messages(body):
            messages += map(same_form, plain_messages(message))
        tools = None if body.get("tool_choice") == {"type": "none"} else list(map(tool, body.get("tools") or []))
        most = self.most(body, "max_tokens")
        return Wish(messages, tools, most, self.stops("stop_sequences", body.get("stop_sequences")))

    def whole(self, session: AgentSession, turn: Turn) -> Body:
        text, calls = session.answer(turn)["content"], calls_of(session, turn)
        content = [{"type": "text", "text": text}] if text or not calls else []
        content += [{"type": "tool_use", "id": number, "name": name, "input": given} for number, name, given in calls]
        return self._head(session, turn) | {"content": content, **self._ending(session, turn), "usage": usage(turn)}

    def begin(self, session: AgentSession, turn: Turn) -> list[Event]:
        nothing: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head(session, turn) | nothing | {"usage": {"input_tokens": turn.start, "output_tokens": 0}}
        return [event("message_start", message=message), block_start(0, {"type": "text", "text": ""})]

    def more(self, session: AgentSession, turn: Turn, text: str) -> Event:
        return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, session: AgentSession, turn: Turn, body: Body, streamed: bool) -> list[Event]:
        events = [event("content_block_stop", index=0)]
        for place, (number, name, arguments) in enumerate(calls_of(session, turn), start=1):
            delta = {"type": "input_json_delta", "partial_json": orjson.dumps(arguments).decode()}
            events.append(block_start(place, {"type": "tool_use", "id": number, "name": name, "input": {}}))
            events.append(event("content_block_delta", index=place, delta=delta))
            events.append(event("content_block_stop", index=place))
        events.append(event("message_delta", delta=self._ending(session, turn), usage=usage(turn)))
        return [*events, event("message_stop")]

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": f"{code}: {text}"}}

    def _head(self, session: AgentSession, turn: Turn) -> Body:
        return {"id": f"msg_{name_of(session, turn)}", "type": "message", "role": "assistant", "model": self.model}

    def _ending(self, session: AgentSession, turn: Turn) -> Body:
        named = turn.ids[-1] in turn.request.stops
        if not session.ends_with_stop(turn):
            reason = "max_tokens"
        elif calls_of(session, turn):
            reason = "tool_use"
        else:
            reason = "stop_sequence" if named else "end_turn"
        stop = self.tokenizer.inner.decode([turn.ids[-1]]) if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}


def plain_messages(message: Any) -> Iterator[Message]:
    """A message of blocks as messages of text: what tools have answered is said by tools."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        yield message
        return
    texts, calls = [], []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "name": str(name), "input": arguments}:
                calls.append({"function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result"}:
                said = {"role": "tool", "content": text_of(block.get("content"))}
                yield said | {"tool_call_id": block.get("tool_use_id")}
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                raise BadMessages("a block is text, tool_use or tool_result; others are not supported")
    if texts or calls:
        yield {"role": message.get("role"), "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})


def tool(described: Any) -> Body:
    """A tool as chat templates are told of it."""
    try:
        schema, name = described["input_schema"], described["name"]
    except (KeyError, TypeError):
        raise BadMessages("a tool has a name and an input_schema") from None
    return {
        "type": "function",
        "function": {"name": name, "description": described.get("description", ""), "parameters": schema},
    }


def event(kind: str, **more: Any) -> Event:
    return Event({"type": kind, **more}, kind)


def block_start(place: int, block: Body) -> Event:
    return event("content_block_start", index=place, content_block=block)


def usage(turn: Turn) -> dict[str, int]:
    return {"input_tokens": turn.start, "output_tokens": len(turn.ids)}
