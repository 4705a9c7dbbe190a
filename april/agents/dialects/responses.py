"""OpenAI's Responses API, as the gateway serves it."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from april.agents.conversation_tree import ConversationTree, PolicyCall, Refusal, Turn
from april.agents.dialects.base import Body, Dialect, StreamEvent, tool_calls_of, turn_name
from april.agents.dialects.chat import Chat
from april.data.messages import BadMessages, Message, content_of, normalized, text_of


class Responses(Dialect):
    path = "/v1/responses"
    neutral_values: ClassVar = {
        "top_p": (1,),
        "tool_choice": ("auto", "none"),
        "text": ({"format": {"type": "text"}}, {}),
        "background": (False,),
        "top_logprobs": (0,),
    }
    numbers_events = True

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return Chat.key(headers)

    def parse(self, body: Body, session: ConversationTree) -> PolicyCall:
        self.check(body, session)
        messages = self._before(body, session) + list(map(normalized, plain_messages(body.get("input"))))
        tools = list(map(tool, body.get("tools") or [])) if body.get("tool_choice") != "none" else None
        return PolicyCall(messages, tools, self.max_tokens(body, "max_output_tokens"))

    def _before(self, body: Body, session: ConversationTree) -> list[Message]:
        """The messages before the new input of a request `body`: those of the response named by `previous_response_id`,
        its answer included, or else the `instructions` as a system message. Raises Refusal if the session has no such
        response."""
        if previous_id := body.get("previous_response_id"):
            turn = next((turn for turn in session.turns if self._id(session, turn) == previous_id), None)
            if turn is None or turn.messages is None or not turn.complete:
                reason = f"'previous_response_id' = {previous_id!r} is no response of this session"
                raise Refusal("previous_response_not_found", reason)
            return [*turn.messages, session.answer(turn)]
        instructions = text_of(body.get("instructions"))
        return [{"role": "system", "content": instructions}] if instructions else []

    def response_body(self, session: ConversationTree, turn: Turn) -> Body:
        stopped = session.ends_with_stop(turn)
        return self._head(session, turn, "completed" if stopped else "incomplete") | {
            "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
            "output": self._output(session, turn),
            "usage": usage(turn),
        }

    def _output(self, session: ConversationTree, turn: Turn) -> list[Body]:
        text, calls = session.answer(turn)["content"], tool_calls_of(session, turn)
        items = [self._message(session, turn, [text_part(text)], "completed")] if text or not calls else []
        return items + [function_call(*call, "completed") for call in calls]

    def stream_start(self, session: ConversationTree, turn: Turn) -> list[StreamEvent]:
        response = self._head(session, turn, "in_progress") | {"output": [], "usage": None}
        position = self._text_position(session, turn)
        return [
            event("response.created", response=response),
            event("response.in_progress", response=response),
            event("response.output_item.added", output_index=0, item=self._message(session, turn, [], "in_progress")),
            event("response.content_part.added", part=text_part(""), **position),
        ]

    def stream_delta(self, session: ConversationTree, turn: Turn, text: str) -> StreamEvent:
        return event("response.output_text.delta", delta=text, logprobs=[], **self._text_position(session, turn))

    def stream_end(self, session: ConversationTree, turn: Turn, body: Body, streamed: bool) -> list[StreamEvent]:
        text, position = session.answer(turn)["content"], self._text_position(session, turn)
        message = self._message(session, turn, [text_part(text)], "completed")
        events = [
            event("response.output_text.done", text=text, logprobs=[], **position),
            event("response.content_part.done", part=text_part(text), **position),
            event("response.output_item.done", output_index=0, item=message),
        ]
        calls = tool_calls_of(session, turn)
        for index, call in enumerate(calls, start=1):
            events += call_events(index, *call)
        response = self.response_body(session, turn)
        response["output"] = [message, *(function_call(*call, "completed") for call in calls)]
        return [*events, event(f"response.{response['status']}", response=response)]

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        return Chat.error(code, text, status)

    @staticmethod
    def _id(session: ConversationTree, turn: Turn) -> str:
        return f"resp_{turn_name(session, turn)}"

    def _head(self, session: ConversationTree, turn: Turn, status: str) -> Body:
        return {
            "id": self._id(session, turn), "object": "response", "created_at": int(time.time()), "status": status,
            "model": self.model, "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "parallel_tool_calls": True, "temperature": session.lease.temperature, "top_p": 1.0, "tools": [],
            "tool_choice": "auto",
        }  # fmt: skip

    def _message(self, session: ConversationTree, turn: Turn, content: list[Body], status: str) -> Body:
        message_id = f"msg_{turn_name(session, turn)}"
        return {"type": "message", "id": message_id, "role": "assistant", "status": status, "content": content}

    def _text_position(self, session: ConversationTree, turn: Turn) -> Body:
        """Fields of an event that say where the answer's text stands in the response: id of the message, its index, and
        the index of its content part."""
        return {"item_id": f"msg_{turn_name(session, turn)}", "output_index": 0, "content_index": 0}


def plain_messages(items: Any) -> Iterator[Message]:
    """Convert the `input` of a request, a text or a list of items, to chat messages; text and function calls of one
    assistant turn become one message. Raises BadMessages."""
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    if not isinstance(items, list) or not items:
        raise BadMessages("'input' is a text, or a list of at least one item")
    pending: Message | None = None
    for item in items:
        match item:
            case {"type": "reasoning"}:
                continue
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                pending = pending or {"role": "assistant", "content": ""}
                pending["tool_calls"] = [
                    *pending.get("tool_calls", []), {"function": {"name": name, "arguments": arguments}}
                ]  # fmt: skip
                continue
            case {"role": "assistant"} if pending is None:
                pending = {"role": "assistant", "content": text_of(item.get("content"))}
                continue
        if pending:
            yield pending
            pending = None
        match item:
            case {"type": "function_call_output", "call_id": call_id}:
                yield {"role": "tool", "content": content_of(item.get("output")), "tool_call_id": call_id}
            case {"role": "assistant"}:
                pending = {"role": "assistant", "content": text_of(item.get("content"))}
            case {"role": role}:
                yield {"role": role, "content": item.get("content")}
            case _:
                raise BadMessages("an item is a message, function_call, function_call_output or reasoning")
    if pending:
        yield pending


def tool(definition: Any) -> Body:
    """Convert a tool definition of this API to the form that chat templates take. Raises BadMessages."""
    match definition:
        case {"type": "function", "name": name}:
            rest = {key: definition[key] for key in ("description", "parameters") if definition.get(key) is not None}
            return {"type": "function", "function": {"name": name, **rest}}
    raise BadMessages("a tool is a function with a name; those that a vendor's servers run are not here")


def text_part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def function_call(call_id: str, name: str, arguments: Any, status: str) -> Body:
    encoded = orjson.dumps(arguments).decode() if status == "completed" else ""
    return {
        "type": "function_call", "id": call_id.replace("call_", "fc_"), "call_id": call_id, "name": name,
        "arguments": encoded, "status": status,
    }  # fmt: skip


def call_events(index: int, call_id: str, name: str, arguments: Any) -> list[StreamEvent]:
    done = function_call(call_id, name, arguments, "completed")
    position = {"output_index": index, "item_id": done["id"]}
    started = function_call(call_id, name, arguments, "in_progress")
    return [
        event("response.output_item.added", output_index=index, item=started),
        event("response.function_call_arguments.delta", delta=done["arguments"], **position),
        event("response.function_call_arguments.done", arguments=done["arguments"], name=name, **position),
        event("response.output_item.done", output_index=index, item=done),
    ]


def event(kind: str, **fields: Any) -> StreamEvent:
    return StreamEvent({"type": kind, **fields}, kind)


def usage(turn: Turn) -> Body:
    return {
        "input_tokens": turn.start, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(turn.ids), "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": turn.end,
    }  # fmt: skip
