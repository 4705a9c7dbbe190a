"""The HTTP server that agents speak with: one key a session, and only what is on the broker's disk is answered.

A call stays open until its answer is there, however often its sample is aborted, moved and resumed meanwhile.
"""

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from april.agents.dialects import Dialect
from april.agents.dialects.base import Event
from april.agents.elsewhere import KEY, MOVED, OVER, Elsewhere, key_of_session
from april.agents.host import packed
from april.agents.rendering import BadMessages
from april.agents.session import AgentSession, Refusal, Turn

BODY_BYTES = 8 << 20
"""of a request"""
FORMER_KEYS = 10_000
"""that are remembered"""
OF_NO_SESSION = ("/v1/models", "/v1/sessions")
"""what is asked without the key of one"""
SDK_RETRIES, SAME_CALL = "x-stainless-retry-count", "idempotency-key"


class Gateway:
    """gateway = Gateway([Chat(tokenizer, model="my-run", ignores=False)])
    key = gateway.admit(session)       # what its agent has to say with each call
    """

    def __init__(self, dialects: list[Dialect]):
        self.dialects = dialects
        self.of_path = {dialect.path: dialect for dialect in dialects}
        self.sessions: dict[str, AgentSession] = {}
        """by the key of the execution that may speak"""
        self.former: dict[str, int] = {}
        """keys that opened a session once, with the HTTP status that they get now"""
        self.elsewhere: Elsewhere | None = None
        """whoever else has sessions; None where nobody has"""
        self.counts: Counter[str] = Counter()
        """of answers by HTTP status"""
        self.refusals: Counter[str] = Counter()
        """of requests by their code"""
        self.app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._errors])
        for dialect in dialects:
            self.app.router.add_post(dialect.path, self._converse)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/session/reward", self._reward)
        self.app.router.add_post("/v1/session/state", self._state)
        self.app.router.add_get("/v1/session", self._session)

    def admit(self, session: AgentSession) -> str:
        """The key of a new execution of its agent; older ones are told to end."""
        self.dismiss(session, MOVED)
        session.rewind()
        told = session.told
        key = key_of_session(told.group, told.index, told.lease_id, secrets.token_urlsafe(32))
        self.sessions[key] = session
        return key

    def dismiss(self, session: AgentSession, status: int | None = OVER) -> None:
        """Its key opens nothing any more; `status`: what it gets now, None: the broker is asked."""
        for key in [key for key, one in self.sessions.items() if one is session]:
            del self.sessions[key]
            if status is None:
                continue
            self.former[key] = status
            if len(self.former) > FORMER_KEYS:
                del self.former[next(iter(self.former))]

    # --- requests ---------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        one = {"id": self.dialects[0].model, "object": "model", "created": 0, "owned_by": "april"}
        return answer({"object": "list", "data": [one]})

    async def _session(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        return answer({"replaying": session.replaying, "task": task_of(session), "reward": session.reward})

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self.session_of(request), await read_body(request)
        reward = body.get("reward")
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not abs(reward) <= 1e9:
            raise Refusal("invalid_value", f"'reward' = {reward!r} is no finite number up to 1e9")
        session.reward = float(reward)
        return answer({"reward": session.reward})

    async def _state(self, request: web.Request) -> web.Response:
        session, body = self.session_of(request), await read_body(request)
        try:
            session.state = packed(body.get("state"))
        except (ValueError, TypeError) as error:
            raise Refusal("invalid_value", f"'state': {error}") from None
        return answer({"state": body.get("state")})

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        dialect = self.of_path[request.path]
        session, body = self.session_of(request), await read_body(request)
        turn = session.ask(replace(dialect.wish(body, session), **call_of(request)))
        turn.calls += 1
        try:
            if body.get("stream"):
                return await self._stream(request, body, dialect, session, turn)
            async for _ in news(session, turn):
                pass
            turn.delivered = True
            return answer(dialect.whole(session, turn))
        finally:
            turn.calls -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], dialect: Dialect, session: AgentSession, turn: Turn
    ) -> web.StreamResponse:
        """Server-sent events: text as it reaches the disk; where answers are parsed, once they are whole."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        stream = Stream(response, dialect.numbered)
        await stream.send(*dialect.begin(session, turn))
        sent = ""
        try:
            async for _ in news(session, turn):
                text = session.text_so_far(turn)
                if text.startswith(sent) and len(text) > len(sent):
                    more, sent = text[len(sent) :], text
                    await stream.send(dialect.more(session, turn, more))
        except Refusal as error:
            await stream.send(Event(dialect.error(error.code, str(error), error.status), "error"))
            return response
        turn.delivered = True
        await stream.send(*dialect.end(session, turn, body, bool(sent)))
        await response.write(dialect.farewell)
        return response

    def key_of(self, request: web.Request) -> str:
        """That a request shows, in the manner of any of the APIs."""
        return next(filter(None, (dialect.key(request.headers) for dialect in self.dialects)), "")

    def session_of(self, request: web.Request) -> AgentSession:
        """The one that a request's key opens. Raises Refusal."""
        key = self.key_of(request)
        if self.former.get(key) == MOVED:
            raise Refusal("session_moved", "another execution of this session's agent has taken its place", MOVED)
        if key in self.former:
            raise Refusal("session_over", "the session of this key is over", OVER)
        if key not in self.sessions:
            raise Refusal("invalid_api_key", "this key opens no session", 401)
        return self.sessions[key]

    def _is_of_others(self, request: web.Request) -> bool:
        """Whether it shows a key of a session, and of none that was ever here."""
        key = self.key_of(request)
        mine = key in self.sessions or key in self.former or request.path in OF_NO_SESSION
        return not mine and KEY.fullmatch(key) is not None

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refusals in the shape of the API: what an agent can handle, and does not try again for ever."""
        refused = self.of_path.get(request.path, self.dialects[0]).error
        try:
            if self.elsewhere and self._is_of_others(request):
                response = await self.elsewhere.answer(request, self.key_of(request))
            else:
                response = await handler(request)
        except Refusal as error:
            self.refusals[error.code] += 1
            response = answer(refused(error.code, str(error), error.status), error.status)
        except BadMessages as error:
            response = answer(refused("invalid_messages", str(error), 400), 400)
        except web.HTTPException as error:
            response = answer(refused("invalid_request", error.reason, error.status), error.status)
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


def call_of(request: web.Request) -> dict[str, Any]:
    """What a client says of a call itself: its name, and whether it asks once more."""
    retried = request.headers.get(SDK_RETRIES, "0") not in ("", "0")
    return {"name": request.headers.get(SAME_CALL, ""), "repeated": retried}


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


@dataclass
class Stream:
    """Of server-sent events."""

    response: web.StreamResponse
    numbered: bool
    sent: int = 0

    async def send(self, *events: Event) -> None:
        for data, name in events:
            number = {"sequence_number": self.sent} if self.numbered else {}
            head = f"event: {name}\n".encode() if name else b""
            await self.response.write(head + b"data: " + orjson.dumps(data | number) + b"\n\n")
            self.sent += 1
