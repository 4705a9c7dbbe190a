"""OpenAI's Chat Completions."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from april.agents.dialects.base import Body, Dialect, Event, calls_of, name_of
from april.agents.rendering import same_form
from april.agents.session import AgentSession, Turn, Wish


class Chat(Dialect):
    path = "/v1/chat/completions"
    neutral: ClassVar = {
        "n": (1,),
        "top_p": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "functions": ([],),
        "logprobs": (False,),
        "top_logprobs": (0,),
    }
    farewell = b"data: [DONE]\n\n"

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def wish(self, body: Body, session: AgentSession) -> Wish:
        self.check(body, session)
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        messages = list(map(same_form, self.messages(body)))
        most = self.most(body, "max_completion_tokens", "max_tokens")
        return Wish(messages, tools, most, self.stops("stop", body.get("stop")))

    def whole(self, session: AgentSession, turn: Turn) -> Body:
        said = session.answer(turn)
        message: Body = {"role": "assistant", "content": said["content"], "refusal": None}
        if calls := calls_of(session, turn):
            message |= {"content": said["content"] or None, "tool_calls": list(map(tool_call, calls))}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(session, turn), "logprobs": None}
        return self._head(session, turn, "chat.completion") | {"choices": [choice], "usage": usage(turn)}

    def begin(self, session: AgentSession, turn: Turn) -> list[Event]:
        return [self._piece(session, turn, {"role": "assistant", "content": ""})]

    def more(self, session: AgentSession, turn: Turn, text: str) -> Event:
        return self._piece(session, turn, {"content": text})

    def end(self, session: AgentSession, turn: Turn, body: Body, streamed: bool) -> list[Event]:
        events = []
        for place, call in enumerate(calls_of(session, turn)):
            events.append(self._piece(session, turn, {"tool_calls": [{"index": place} | tool_call(call)]}))
        events.append(self._piece(session, turn, {}, finish_reason(session, turn)))
        if (body.get("stream_options") or {}).get("include_usage"):
            head = self._head(session, turn, "chat.completion.chunk")
            events.append(Event(head | {"choices": [], "usage": usage(turn)}))
        return events

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}

    def _head(self, session: AgentSession, turn: Turn, kind: str) -> Body:
        name = name_of(session, turn)
        return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": self.model}

    def _piece(self, session: AgentSession, turn: Turn, delta: Body, reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return Event(self._head(session, turn, "chat.completion.chunk") | {"choices": [choice]})


def tool_call(call: tuple[str, str, Any]) -> Body:
    number, name, arguments = call
    return {"id": number, "type": "function", "function": {"name": name, "arguments": orjson.dumps(arguments).decode()}}


def finish_reason(session: AgentSession, turn: Turn) -> str:
    if session.ends_with_stop(turn):
        return "tool_calls" if calls_of(session, turn) else "stop"
    return "length"


def usage(turn: Turn) -> dict[str, int]:
    said = len(turn.ids)
    return {"prompt_tokens": turn.start, "completion_tokens": said, "total_tokens": turn.start + said}
