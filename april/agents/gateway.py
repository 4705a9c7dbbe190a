"""The HTTP server that agents speak with: one key a session, and only what is on the broker's disk is answered.

A call stays open until its answer is there, however often its sample is aborted, moved and resumed meanwhile.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from april.agents import chat
from april.agents.rendering import BadMessages
from april.agents.session import AgentSession, Refusal, Turn

BODY_BYTES = 8 << 20
"""of a request"""
UNFINISHED_TEXT = "\ufffd"
"""the end of a text whose last character has not come whole"""
MOVED, OVER = 409, 410
"""HTTP statuses of keys that open nothing any more"""
FORMER_KEYS = 10_000
"""that are remembered"""
SDK_RETRIES, SAME_CALL = "x-stainless-retry-count", "idempotency-key"


class Gateway:
    """gateway = Gateway(chat, model="my-run")
    key = gateway.admit(session)       # what its agent has to say with each call
    """

    def __init__(self, dialect: chat.Chat, model: str):
        self.dialect = dialect
        self.model = model
        self.sessions: dict[str, AgentSession] = {}
        """by the key of the execution that may speak"""
        self.former: dict[str, int] = {}
        """keys that opened a session once, with the HTTP status that they get now"""
        self.counts: Counter[str] = Counter()
        """of answers by HTTP status"""
        self.calls: dict[AgentSession, str] = {}
        """the idempotency key of the last call of a session that named one"""
        self.app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._errors])
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/session/reward", self._reward)
        self.app.router.add_get("/v1/session", self._session)

    def admit(self, session: AgentSession) -> str:
        """The key of a new execution of its agent; older ones are told to end."""
        self.dismiss(session, MOVED)
        session.rewind()
        key = secrets.token_urlsafe(32)
        self.sessions[key] = session
        return key

    def dismiss(self, session: AgentSession, status: int = OVER) -> None:
        for key in [key for key, one in self.sessions.items() if one is session]:
            del self.sessions[key]
            self.former[key] = status
            if len(self.former) > FORMER_KEYS:
                del self.former[next(iter(self.former))]
        self.calls.pop(session, None)

    # --- requests ---------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "april"}
        return answer({"object": "list", "data": [one]})

    async def _session(self, request: web.Request) -> web.Response:
        session = self._of(request)
        return answer({"replaying": session.replaying, "task": task_of(session), "reward": session.reward})

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._of(request), await read_body(request)
        reward = body.get("reward")
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not abs(reward) <= 1e9:
            raise Refusal("invalid_value", f"'reward' = {reward!r} is no finite number up to 1e9")
        session.reward = float(reward)
        return answer({"reward": session.reward})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = self._of(request), await read_body(request)
        turn = session.ask(self.dialect.wish(body, session, self._is_repeated(request, session)))
        if body.get("stream"):
            options = body.get("stream_options") or {}
            return await self._stream(request, session, turn, bool(options.get("include_usage")))
        async for _ in news(session, turn):
            pass
        turn.delivered = True
        return answer(chat.completion(session, turn, self.model))

    async def _stream(
        self, request: web.Request, session: AgentSession, turn: Turn, with_usage: bool
    ) -> web.StreamResponse:
        """Server-sent events: text as it reaches the disk."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        sent, delta = "", {"role": "assistant", "content": ""}
        await send(response, chat.piece(session, turn, self.model, delta, None))
        try:
            async for _ in news(session, turn):
                text = session.text(turn)
                if not turn.over:
                    text = text.rstrip(UNFINISHED_TEXT)
                if text.startswith(sent) and len(text) > len(sent):
                    delta, sent = {"content": text[len(sent) :]}, text
                    await send(response, chat.piece(session, turn, self.model, delta, None))
        except Refusal as error:
            await send(response, error_body(error.code, str(error)))
            return response
        turn.delivered = True
        await send(response, chat.piece(session, turn, self.model, {}, chat.finish_reason(session, turn)))
        if with_usage:
            last = chat.piece(session, turn, self.model, {}, None)
            await send(response, last | {"choices": [], "usage": chat.usage(turn)})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _of(self, request: web.Request) -> AgentSession:
        """The session that a request's key opens."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if self.former.get(key) == MOVED:
            raise Refusal("session_moved", "another execution of this session's agent has taken its place", MOVED)
        if key in self.former:
            raise Refusal("session_over", "the session of this key is over", OVER)
        if key not in self.sessions:
            raise Refusal("invalid_api_key", "this key opens no session", 401)
        return self.sessions[key]

    def _is_repeated(self, request: web.Request, session: AgentSession) -> bool:
        """Whether the client says that it asks once more."""
        named = request.headers.get(SAME_CALL, "")
        same = bool(named) and self.calls.get(session) == named
        if named:
            self.calls[session] = named
        return same or request.headers.get(SDK_RETRIES, "0") not in ("", "0")

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refusals in the shape of the API: what an agent can handle, and does not try again for ever."""
        try:
            response = await handler(request)
        except Refusal as error:
            response = answer(error_body(error.code, str(error)), error.status)
        except BadMessages as error:
            response = answer(error_body("invalid_messages", str(error)), 400)
        except web.HTTPException as error:
            response = answer(error_body("invalid_request", error.reason), error.status)
        self.counts[str(response.status)] += 1
        return response


def task_of(session: AgentSession) -> dict[str, Any]:
    """What its agent is to do: the row's prompt as `messages`, its `label`, and which sample it is."""
    told = session.told
    prompt = orjson.loads(told.prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "messages": messages, "label": told.label, "group": told.group, "index": told.index,
        "evaluation": told.evaluation,
    }  # fmt: skip


async def news(session: AgentSession, turn: Turn) -> Any:
    """Yields whenever more of the turn is there, and once when it is over. Raises Refusal when the session is."""
    while True:
        turn.news.clear()
        if turn.ids:
            yield
        if turn.over:
            return
        if session.ended:
            raise Refusal("session_over", f"this session is over: {session.ended}", 410)
        await turn.news.wait()


async def read_body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise Refusal("invalid_request", "the body is no JSON object")
    return body


def answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def error_body(code: str, text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await asyncio.sleep(0)
