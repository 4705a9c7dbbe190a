"""Anthropic's Messages API, as the gateway serves it."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from april.agents.conversation_tree import ConversationTree, PolicyCall, Turn
from april.agents.dialects.base import Body, Dialect, StreamEvent, tool_calls_of, turn_name
from april.data.messages import BadMessages, Message, content_of, normalized, text_of

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error"}


class Messages(Dialect):
    path = "/v1/messages"
    neutral_values: ClassVar = {"top_p": (1,), "top_k": (0,), "tool_choice": ({"type": "auto"}, {"type": "none"})}

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "").strip()

    def parse(self, body: Body, session: ConversationTree) -> PolicyCall:
        self.check(body, session)
        system = text_of(body.get("system"))
        messages = [{"role": "system", "content": system}] if system else []
        for message in self.messages(body):
            messages += map(normalized, plain_messages(message))
        tools = None if body.get("tool_choice") == {"type": "none"} else list(map(tool, body.get("tools") or []))
        max_tokens = self.max_tokens(body, "max_tokens")
        return PolicyCall(
            messages, tools, max_tokens, self.stop_token_ids("stop_sequences", body.get("stop_sequences"))
        )

    def response_body(self, session: ConversationTree, turn: Turn) -> Body:
        text, calls = session.answer(turn)["content"], tool_calls_of(session, turn)
        content = [{"type": "text", "text": text}] if text or not calls else []
        content += [{"type": "tool_use", "id": call_id, "name": name, "input": value} for call_id, name, value in calls]
        return self._head(session, turn) | {"content": content, **self._ending(session, turn), "usage": usage(turn)}

    def stream_start(self, session: ConversationTree, turn: Turn) -> list[StreamEvent]:
        empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head(session, turn) | empty | {"usage": {"input_tokens": turn.start, "output_tokens": 0}}
        return [event("message_start", message=message), block_start(0, {"type": "text", "text": ""})]

    def stream_delta(self, session: ConversationTree, turn: Turn, text: str) -> StreamEvent:
        return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def stream_end(self, session: ConversationTree, turn: Turn, body: Body, streamed: bool) -> list[StreamEvent]:
        events = [event("content_block_stop", index=0)]
        for index, (call_id, name, arguments) in enumerate(tool_calls_of(session, turn), start=1):
            delta = {"type": "input_json_delta", "partial_json": orjson.dumps(arguments).decode()}
            events.append(block_start(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}}))
            events.append(event("content_block_delta", index=index, delta=delta))
            events.append(event("content_block_stop", index=index))
        events.append(event("message_delta", delta=self._ending(session, turn), usage=usage(turn)))
        return [*events, event("message_stop")]

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": f"{code}: {text}"}}

    def _head(self, session: ConversationTree, turn: Turn) -> Body:
        return {"id": f"msg_{turn_name(session, turn)}", "type": "message", "role": "assistant", "model": self.model}

    def _ending(self, session: ConversationTree, turn: Turn) -> Body:
        is_stop_sequence = turn.ids[-1] in turn.request.stop_token_ids
        if not session.ends_with_stop(turn):
            reason = "max_tokens"
        elif tool_calls_of(session, turn):
            reason = "tool_use"
        else:
            reason = "stop_sequence" if is_stop_sequence else "end_turn"
        stop = self.tokenizer.inner.decode([turn.ids[-1]]) if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}


def plain_messages(message: Any) -> Iterator[Message]:
    """Convert a message of content blocks to plain messages; each tool result becomes a message of role "tool"."""
    blocks = message.get("content") if isinstance(message, dict) else None
    if not isinstance(blocks, list):
        yield message
        return
    parts, calls = [], []
    for block in blocks:
        match block:
            case {"type": "text", "text": str()} | {"type": "image"}:
                parts.append(block)
            case {"type": "tool_use", "name": str(name), "input": arguments}:
                calls.append({"function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result"}:
                content = content_of(block.get("content"))
                yield {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                raise BadMessages("a block is text, image, tool_use or tool_result; others are not supported")
    if parts or calls:
        yield {"role": message.get("role"), "content": content_of(parts)} | ({"tool_calls": calls} if calls else {})


def tool(definition: Any) -> Body:
    """Convert a tool definition of this API to the form that chat templates take. Raises BadMessages."""
    try:
        schema, name = definition["input_schema"], definition["name"]
    except (KeyError, TypeError):
        raise BadMessages("a tool has a name and an input_schema") from None
    return {
        "type": "function",
        "function": {"name": name, "description": definition.get("description", ""), "parameters": schema},
    }


def event(kind: str, **fields: Any) -> StreamEvent:
    return StreamEvent({"type": kind, **fields}, kind)


def block_start(index: int, block: Body) -> StreamEvent:
    return event("content_block_start", index=index, content_block=block)


def usage(turn: Turn) -> dict[str, int]:
    return {"input_tokens": turn.start, "output_tokens": len(turn.ids)}
