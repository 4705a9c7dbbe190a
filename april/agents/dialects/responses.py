"""OpenAI's Responses."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from april.agents.dialects.base import Body, Dialect, Event, calls_of, name_of
from april.agents.dialects.chat import Chat
from april.agents.rendering import BadMessages, Message, same_form, text_of
from april.agents.session import AgentSession, Refusal, Turn, Wish


class Responses(Dialect):
    path = "/v1/responses"
    neutral: ClassVar = {
        "top_p": (1,),
        "tool_choice": ("auto", "none"),
        "text": ({"format": {"type": "text"}}, {}),
        "background": (False,),
        "top_logprobs": (0,),
    }
    numbered = True

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return Chat.key(headers)

    def wish(self, body: Body, session: AgentSession) -> Wish:
        self.check(body, session)
        messages = self._before(body, session) + list(map(same_form, plain_messages(body.get("input"))))
        tools = [tool(one) for one in body.get("tools") or []] if body.get("tool_choice") != "none" else None
        return Wish(messages, tools, self.most(body, "max_output_tokens"))

    def _before(self, body: Body, session: AgentSession) -> list[Message]:
        """What the input goes on from: the answer that the request names, or the instructions."""
        if named := body.get("previous_response_id"):
            turn = next((one for one in session.turns if self._id(session, one) == named), None)
            if turn is None or turn.messages is None or not turn.over:
                raise Refusal("previous_response_not_found", f"'previous_response_id' = {named!r} is no answer of here")
            return [*turn.messages, session.answer(turn)]
        instructions = text_of(body.get("instructions"))
        return [{"role": "system", "content": instructions}] if instructions else []

    def whole(self, session: AgentSession, turn: Turn) -> Body:
        stopped = session.ends_with_stop(turn)
        return self._head(session, turn, "completed" if stopped else "incomplete") | {
            "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
            "output": self._output(session, turn),
            "usage": usage(turn),
        }

    def _output(self, session: AgentSession, turn: Turn) -> list[Body]:
        text, calls = session.answer(turn)["content"], calls_of(session, turn)
        items = [self._message(session, turn, [part(text)], "completed")] if text or not calls else []
        return items + [function_call(*call, "completed") for call in calls]

    def begin(self, session: AgentSession, turn: Turn) -> list[Event]:
        response = self._head(session, turn, "in_progress") | {"output": [], "usage": None}
        here = self._place(session, turn)
        return [
            event("response.created", response=response),
            event("response.in_progress", response=response),
            event("response.output_item.added", output_index=0, item=self._message(session, turn, [], "in_progress")),
            event("response.content_part.added", part=part(""), **here),
        ]

    def more(self, session: AgentSession, turn: Turn, text: str) -> Event:
        return event("response.output_text.delta", delta=text, logprobs=[], **self._place(session, turn))

    def end(self, session: AgentSession, turn: Turn, body: Body, streamed: bool) -> list[Event]:
        text, here = session.answer(turn)["content"], self._place(session, turn)
        message = self._message(session, turn, [part(text)], "completed")
        events = [
            event("response.output_text.done", text=text, logprobs=[], **here),
            event("response.content_part.done", part=part(text), **here),
            event("response.output_item.done", output_index=0, item=message),
        ]
        calls = calls_of(session, turn)
        for place, call in enumerate(calls, start=1):
            events += call_events(place, *call)
        response = self.whole(session, turn)
        response["output"] = [message, *(function_call(*call, "completed") for call in calls)]
        return [*events, event(f"response.{response['status']}", response=response)]

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        return Chat.error(code, text, status)

    @staticmethod
    def _id(session: AgentSession, turn: Turn) -> str:
        return f"resp_{name_of(session, turn)}"

    def _head(self, session: AgentSession, turn: Turn, status: str) -> Body:
        return {
            "id": self._id(session, turn), "object": "response", "created_at": int(time.time()), "status": status,
            "model": self.model, "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "parallel_tool_calls": True, "temperature": session.told.temperature, "top_p": 1.0, "tools": [],
            "tool_choice": "auto",
        }  # fmt: skip

    def _message(self, session: AgentSession, turn: Turn, content: list[Body], status: str) -> Body:
        number = f"msg_{name_of(session, turn)}"
        return {"type": "message", "id": number, "role": "assistant", "status": status, "content": content}

    def _place(self, session: AgentSession, turn: Turn) -> Body:
        """Of the text among the output."""
        return {"item_id": f"msg_{name_of(session, turn)}", "output_index": 0, "content_index": 0}


def plain_messages(given: Any) -> Iterator[Message]:
    """Items as messages: what the policy has said and called in one turn is one message."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not isinstance(given, list) or not given:
        raise BadMessages("'input' is a text, or a list of at least one item")
    said: Message | None = None
    for item in given:
        match item:
            case {"type": "reasoning"}:
                continue
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                said = said or {"role": "assistant", "content": ""}
                said["tool_calls"] = [
                    *said.get("tool_calls", []), {"function": {"name": name, "arguments": arguments}}
                ]  # fmt: skip
                continue
            case {"role": "assistant"} if said is None:
                said = {"role": "assistant", "content": text_of(item.get("content"))}
                continue
        if said:
            yield said
            said = None
        match item:
            case {"type": "function_call_output", "call_id": call_id}:
                yield {"role": "tool", "content": text_of(item.get("output")), "tool_call_id": call_id}
            case {"role": "assistant"}:
                said = {"role": "assistant", "content": text_of(item.get("content"))}
            case {"role": role}:
                yield {"role": role, "content": item.get("content")}
            case _:
                raise BadMessages("an item is a message, function_call, function_call_output or reasoning")
    if said:
        yield said


def tool(described: Any) -> Body:
    """A tool as chat templates are told of it."""
    match described:
        case {"type": "function", "name": name}:
            inner = {key: described[key] for key in ("description", "parameters") if described.get(key) is not None}
            return {"type": "function", "function": {"name": name, **inner}}
    raise BadMessages("a tool is a function with a name; those that a vendor's servers run are not here")


def part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def function_call(number: str, name: str, arguments: Any, status: str) -> Body:
    given = orjson.dumps(arguments).decode() if status == "completed" else ""
    return {
        "type": "function_call", "id": number.replace("call_", "fc_"), "call_id": number, "name": name,
        "arguments": given, "status": status,
    }  # fmt: skip


def call_events(place: int, number: str, name: str, arguments: Any) -> list[Event]:
    done = function_call(number, name, arguments, "completed")
    here = {"output_index": place, "item_id": done["id"]}
    begun = function_call(number, name, arguments, "in_progress")
    return [
        event("response.output_item.added", output_index=place, item=begun),
        event("response.function_call_arguments.delta", delta=done["arguments"], **here),
        event("response.function_call_arguments.done", arguments=done["arguments"], name=name, **here),
        event("response.output_item.done", output_index=place, item=done),
    ]


def event(kind: str, **more: Any) -> Event:
    return Event({"type": kind, **more}, kind)


def usage(turn: Turn) -> Body:
    said = len(turn.ids)
    return {
        "input_tokens": turn.start, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": turn.start + said,
    }  # fmt: skip
