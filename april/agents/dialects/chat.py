"""OpenAI's Chat Completions API, as the gateway serves it."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from april.agents.conversation_tree import ConversationTree, PolicyCall, Turn
from april.agents.dialects.base import Body, Dialect, StreamEvent, tool_calls_of, turn_name
from april.data.messages import normalized


class Chat(Dialect):
    path = "/v1/chat/completions"
    neutral_values: ClassVar = {
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
    stream_terminator = b"data: [DONE]\n\n"

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def parse(self, body: Body, session: ConversationTree) -> PolicyCall:
        self.check(body, session)
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        messages = list(map(normalized, self.messages(body)))
        max_tokens = self.max_tokens(body, "max_completion_tokens", "max_tokens")
        return PolicyCall(messages, tools, max_tokens, self.stop_token_ids("stop", body.get("stop")))

    def response_body(self, session: ConversationTree, turn: Turn) -> Body:
        answer = session.answer(turn)
        message: Body = {"role": "assistant", "content": answer["content"], "refusal": None}
        if calls := tool_calls_of(session, turn):
            message |= {"content": answer["content"] or None, "tool_calls": list(map(tool_call, calls))}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(session, turn), "logprobs": None}
        return self._head(session, turn, "chat.completion") | {"choices": [choice], "usage": usage(turn)}

    def stream_start(self, session: ConversationTree, turn: Turn) -> list[StreamEvent]:
        return [self._piece(session, turn, {"role": "assistant", "content": ""})]

    def stream_delta(self, session: ConversationTree, turn: Turn, text: str) -> StreamEvent:
        return self._piece(session, turn, {"content": text})

    def stream_end(self, session: ConversationTree, turn: Turn, body: Body, streamed: bool) -> list[StreamEvent]:
        events = []
        for index, call in enumerate(tool_calls_of(session, turn)):
            events.append(self._piece(session, turn, {"tool_calls": [{"index": index} | tool_call(call)]}))
        events.append(self._piece(session, turn, {}, finish_reason(session, turn)))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            head = self._head(session, turn, "chat.completion.chunk")
            events.append(StreamEvent(head | {"choices": [], "usage": usage(turn)}))
        return events

    @staticmethod
    def error(code: str, text: str, status: int) -> Body:
        return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}

    def _head(self, session: ConversationTree, turn: Turn, kind: str) -> Body:
        name = turn_name(session, turn)
        return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": self.model}

    def _piece(self, session: ConversationTree, turn: Turn, delta: Body, reason: str | None = None) -> StreamEvent:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return StreamEvent(self._head(session, turn, "chat.completion.chunk") | {"choices": [choice]})


def tool_call(call: tuple[str, str, Any]) -> Body:
    call_id, name, arguments = call
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {"id": call_id, "type": "function", "function": function}


def finish_reason(session: ConversationTree, turn: Turn) -> str:
    if session.ends_with_stop(turn):
        return "tool_calls" if tool_calls_of(session, turn) else "stop"
    return "length"


def usage(turn: Turn) -> dict[str, int]:
    return {"prompt_tokens": turn.start, "completion_tokens": len(turn.ids), "total_tokens": turn.end}
