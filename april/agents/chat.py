"""OpenAI's Chat Completions: what a request asks for, and how an answer is written, whole or in pieces.

What would have tokens drawn from another distribution than the run trains on is refused, or ignored and counted:
`agent.overrides`.
"""

import time
from collections import Counter
from typing import Any

from april.agents.rendering import BadMessages, same_form
from april.agents.session import AgentSession, Refusal, Turn, Wish

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""what may be said of each without a consequence, beside nothing"""


class Chat:
    def __init__(self, stop_ids: "StopIds", ignores: bool):
        """`ignores`: what would change the distribution is ignored; otherwise it is refused."""
        self.stop_ids = stop_ids
        self.ignores = ignores
        self.ignored: Counter[str] = Counter()
        """requests that named what was ignored, by its name"""

    def wish(self, body: dict[str, Any], session: AgentSession, repeated: bool) -> Wish:
        """Raises Refusal and BadMessages."""
        self._check(body, session.told.temperature)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadMessages("'messages' is a list of at least one message")
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise Refusal("invalid_value", f"'max_tokens' = {most!r} is no number of tokens; give 1 or more")
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        return Wish(list(map(same_form, messages)), tools, most, self._stops(body.get("stop")), repeated)

    def _check(self, body: dict[str, Any], temperature: float) -> None:
        allowed = NEUTRAL | {"temperature": (temperature,)}
        for key, values in allowed.items():
            if body.get(key) is None or body[key] in values:
                continue
            if not self.ignores:
                raise Refusal(
                    "unsupported_parameter",
                    f"{key!r} = {body[key]!r} would have tokens drawn from another distribution than the run trains "
                    f"on; leave it out, or set agent.overrides = 'ignore' (this run: {values[0]!r})",
                )
            self.ignored[key] += 1

    def _stops(self, stop: Any) -> tuple[int, ...]:
        texts = [stop] if isinstance(stop, str) else stop or []
        ids = []
        for text in texts:
            found = self.stop_ids(text)
            if found is None:
                raise Refusal(
                    "invalid_value", f"'stop' = {text!r} is more than one token of this policy; name a text that is one"
                )
            ids.append(found)
        return tuple(sorted(set(ids)))


class StopIds:
    """The token that a text is."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, text: Any) -> int | None:
        ids = self.tokenizer.encode_prompt(text).tolist() if isinstance(text, str) else []
        return ids[0] if len(ids) == 1 else None


def head_of(session: AgentSession, turn: Turn, model: str, kind: str) -> dict[str, Any]:
    number = session.turns.index(turn)
    return {
        "id": f"chatcmpl-{session.told.lease_id}-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def finish_reason(session: AgentSession, turn: Turn) -> str:
    return "stop" if session.ends_with_stop(turn) else "length"


def completion(session: AgentSession, turn: Turn, model: str) -> dict[str, Any]:
    """The whole answer."""
    choice = {
        "index": 0,
        "message": session.answer(turn) | {"refusal": None},
        "finish_reason": finish_reason(session, turn),
        "logprobs": None,
    }
    return head_of(session, turn, model, "chat.completion") | {"choices": [choice], "usage": usage(turn)}


def usage(turn: Turn) -> dict[str, int]:
    said = len(turn.ids)
    return {"prompt_tokens": turn.start, "completion_tokens": said, "total_tokens": turn.start + said}


def piece(session: AgentSession, turn: Turn, model: str, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """Of an answer that is streamed."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
    return head_of(session, turn, model, "chat.completion.chunk") | {"choices": [choice]}
