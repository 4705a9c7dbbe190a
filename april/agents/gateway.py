"""The HTTP server of the policy's APIs: one key per session; only journaled tokens are ever returned.

A call stays open until its answer is complete, however often its sample is aborted, moved and resumed meanwhile.
"""

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from april.agents.conversation_tree import ConversationTree, PolicyCall, Refusal, Turn
from april.agents.dialects.base import Dialect, StreamEvent
from april.agents.dialects.chat import Chat
from april.agents.dialects.messages import Messages
from april.agents.dialects.responses import Responses
from april.agents.forwarding import (
    MOVED_STATUS,
    OVER_STATUS,
    SESSION_KEY,
    SessionForwarder,
    session_key,
    session_moved,
    session_over,
    unknown_key,
)
from april.agents.host import pack_state
from april.agents.images import RequestImages
from april.agents.listening import AttachKey, served_names
from april.config import Config
from april.data.messages import BadMessages
from april.data.tokenizer import Tokenizer
from april.wire.limits import clip, is_reward, reward_details
from april.wire.security.web_requests import check_requests

DIALECTS: list[type[Dialect]] = [Chat, Responses, Messages]
"""The HTTP APIs that a gateway serves."""
MAX_BODY_BYTES, MAX_BODY_BYTES_WITH_IMAGES = 8 << 20, 64 << 20
"""Largest request body, and the largest in a run whose policy takes images."""
MAX_BODY_DEPTH = 64
"""Deepest nesting of lists and objects in a request body."""
MAX_FORMER_KEYS = 10_000
"""Most closed keys whose HTTP status is remembered; older keys count as unknown."""
SESSIONLESS_PATHS = ("/v1/models", "/v1/sessions")
"""URL paths of requests that need no session key."""
RETRY_COUNT_HEADER, IDEMPOTENCY_HEADER = "x-stainless-retry-count", "idempotency-key"


class Gateway:
    """Answers the requests of agents, each authorized by the key of its session.

    gateway = Gateway([Chat(tokenizer, model="my-run", ignore_overrides=False)])
    key = gateway.admit(session)       # the agent sends it with each call
    """

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer) -> "Gateway":
        """The gateway of a run, with all APIs."""
        ignore_overrides = config.agent.overrides == "ignore"
        dialects = [dialect(tokenizer, config.run.name, ignore_overrides) for dialect in DIALECTS]
        return cls(dialects, served_names(config.agent), RequestImages.of(config, tokenizer))

    def __init__(
        self, dialects: list[Dialect], names: Collection[str] = frozenset(), images: RequestImages | None = None
    ):
        """`dialects`: the HTTP APIs that it serves. `names`: host names by which clients address the server, besides IP
        addresses. `images`: takes the images of requests; None for a policy that takes no images."""
        self.dialects = dialects
        self.images = images or RequestImages(None, "the policy takes no images")
        self.dialect_by_path = {dialect.path: dialect for dialect in dialects}
        self.sessions: dict[str, ConversationTree] = {}
        """Sessions by the API key of their current execution."""
        self.former_keys: dict[str, int] = {}
        """Closed key -> HTTP status of requests that still use the key."""
        self.forwarder: SessionForwarder | None = None
        """Forwards requests for sessions of other agents processes; None: such requests are refused."""
        self.attach_key: AttachKey | None = None
        """Key that authorizes external harnesses to take sessions; None if April runs the agent programs itself."""
        self.counts: Counter[str] = Counter()
        """Number of responses by HTTP status."""
        self.refusals: Counter[str] = Counter()
        """Number of refused requests by the code of their error."""
        self.app = web.Application(
            client_max_size=MAX_BODY_BYTES_WITH_IMAGES if self.images.rule else MAX_BODY_BYTES,
            middlewares=[check_requests(names, self._has_secret), self._render_errors],
        )
        for dialect in dialects:
            self.app.router.add_post(dialect.path, self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/session/reward", self._reward)
        self.app.router.add_post("/v1/session/state", self._state)
        self.app.router.add_get("/v1/session", self._session)

    def admit(self, session: ConversationTree) -> str:
        """Begin a new execution of the session's agent; returns its API key. Requests with earlier keys get
        MOVED_STATUS."""
        self.dismiss(session, MOVED_STATUS)
        session.rewind()
        lease = session.lease
        key = session_key(lease.group, lease.index, lease.lease_id, secrets.token_urlsafe(32))
        self.sessions[key] = session
        return key

    def dismiss(self, session: ConversationTree, status: int | None = OVER_STATUS) -> None:
        """Close the session's key. `status`: HTTP status of later requests with it; None: ask the broker who holds the
        session."""
        for key in [key for key, open_session in self.sessions.items() if open_session is session]:
            del self.sessions[key]
            if status is None:
                continue
            self.former_keys[key] = status
            if len(self.former_keys) > MAX_FORMER_KEYS:
                del self.former_keys[next(iter(self.former_keys))]

    # --- requests ---------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.dialects[0].model, "object": "model", "created": 0, "owned_by": "april"}
        return json_response({"object": "list", "data": [model]})

    async def _session(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        return json_response({"replaying": session.replaying, "task": task_of(session), "reward": session.reward})

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self.session_of(request), await read_body(request)
        reward = body.get("reward")
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not is_reward(reward):
            raise Refusal("invalid_value", f"'reward' = {reward!r} is no finite number up to 1e9")
        try:
            session.details = reward_details(body.get("details", {}))
        except ValueError as error:
            raise Refusal("invalid_value", f"'details': {error}") from None
        session.reward = float(reward)
        return json_response({"reward": session.reward} | ({"details": session.details} if session.details else {}))

    async def _state(self, request: web.Request) -> web.Response:
        session, body = self.session_of(request), await read_body(request)
        try:
            session.state = pack_state(body.get("state"))
        except (ValueError, TypeError) as error:
            raise Refusal("invalid_value", f"'state': {error}") from None
        return json_response({"state": body.get("state")})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        dialect = self.dialect_by_path[request.path]
        session, body = self.session_of(request), await read_body(request)
        sources = await self.images.take(body)
        call = replace(parse_call(dialect, body, session), **call_identity(request))
        await self.images.show(session, call.messages, sources)
        turn = session.request_turn(await session.with_prompt(call))
        turn.pending_calls += 1
        try:
            if body.get("stream"):
                return await self._stream(request, body, dialect, session, turn)
            async for _ in progress(session, turn):
                pass
            turn.delivered = True
            return json_response(dialect.response_body(session, turn))
        finally:
            turn.pending_calls -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], dialect: Dialect, session: ConversationTree, turn: Turn
    ) -> web.StreamResponse:
        """Answer a request by server-sent events: with text as it is journaled or, if the renderer parses answers, once
        the answer is complete."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        stream = ResponseStream(response, dialect.numbers_events)
        await stream.send(*dialect.stream_start(session, turn))
        sent = ""
        try:
            async for _ in progress(session, turn):
                text = session.text_so_far(turn)
                if text.startswith(sent) and len(text) > len(sent):
                    delta, sent = text[len(sent) :], text
                    await stream.send(dialect.stream_delta(session, turn, delta))
        except Refusal as error:
            await stream.send(StreamEvent(dialect.error(error.code, str(error), error.status), "error"))
            return response
        turn.delivered = True
        await stream.send(*dialect.stream_end(session, turn, body, bool(sent)))
        await response.write(dialect.stream_terminator)
        return response

    def key_of(self, request: web.Request) -> str:
        """The key of a request, from the header of any of the APIs; "" without one."""
        return next(filter(None, (dialect.key(request.headers) for dialect in self.dialects)), "")

    def session_of(self, request: web.Request) -> ConversationTree:
        """The session of the request's key. Raises Refusal."""
        key = self.key_of(request)
        if self.former_keys.get(key) == MOVED_STATUS:
            raise session_moved()
        if key in self.former_keys:
            raise session_over()
        if key not in self.sessions:
            raise unknown_key()
        return self.sessions[key]

    def _has_secret(self, request: web.Request) -> bool:
        """Whether a request carries the attach key or a session key; the key of another process's session is checked by
        that process."""
        key = self.key_of(request)
        is_attach_key = self.attach_key is not None and self.attach_key.is_shown(key)
        is_session_key = request.path not in SESSIONLESS_PATHS and SESSION_KEY.fullmatch(key) is not None
        return is_attach_key or is_session_key or key in self.sessions

    def _is_foreign_key(self, request: web.Request) -> bool:
        """Whether the request carries a well-formed session key that this process has never issued."""
        key = self.key_of(request)
        is_own = key in self.sessions or key in self.former_keys or request.path in SESSIONLESS_PATHS
        return not is_own and SESSION_KEY.fullmatch(key) is not None

    @web.middleware
    async def _render_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Middleware: forwards foreign sessions, and renders refusals in the form of the API that was called."""
        render_error = self.dialect_by_path.get(request.path, self.dialects[0]).error
        try:
            if self.forwarder and self._is_foreign_key(request):
                response = await self.forwarder.forward(request, self.key_of(request))
            else:
                response = await handler(request)
        except Refusal as error:
            self.refusals[error.code] += 1
            response = json_response(render_error(error.code, clip(str(error)), error.status), error.status)
        except BadMessages as error:
            response = json_response(render_error("invalid_messages", clip(str(error)), 400), 400)
        except web.HTTPException as error:
            response = json_response(render_error("invalid_request", error.reason, error.status), error.status)
        self.counts[str(response.status)] += 1
        return response


def task_of(session: ConversationTree) -> dict[str, Any]:
    """The task of the session's agent: the row's prompt as `messages`, its `label`, and the identity of the sample."""
    lease = session.lease
    prompt = orjson.loads(lease.prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "messages": messages, "label": lease.label, "group": lease.group, "index": lease.index,
        "evaluation": lease.evaluation,
    }  # fmt: skip


def call_identity(request: web.Request) -> dict[str, Any]:
    """Fields of a `PolicyCall` that the request's headers set: idempotency key, and whether it is a retry."""
    is_retry = request.headers.get(RETRY_COUNT_HEADER, "0") not in ("", "0")
    return {"idempotency_key": request.headers.get(IDEMPOTENCY_HEADER, ""), "is_retry": is_retry}


async def progress(session: ConversationTree, turn: Turn) -> Any:
    """Yield whenever the turn has new tokens; return once it is complete. Raises Refusal when the session ends."""
    while True:
        turn.changed.clear()
        if turn.ids:
            yield
        if turn.complete:
            return
        if session.end_reason:
            raise Refusal("session_over", f"this session is over: {session.end_reason}", 410)
        await turn.changed.wait()


def parse_call(dialect: Dialect, body: dict[str, Any], session: ConversationTree) -> PolicyCall:
    """The call that a request body asks for. Raises Refusal and BadMessages, also where a field is of another type than
    the API has."""
    try:
        return dialect.parse(body, session)
    except (Refusal, BadMessages):
        raise
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise Refusal("invalid_request", f"a field of the body is of another type than it should be: {error}") from None


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body, nested at most MAX_BODY_DEPTH deep. Raises Refusal."""
    try:
        body = orjson.loads(await request.read())
    except (orjson.JSONDecodeError, web.RequestPayloadError, HttpProcessingError):
        body = None
    if not isinstance(body, dict):
        raise Refusal("invalid_request", "the body is no JSON object")
    level: list[Any] = [body]
    for _ in range(MAX_BODY_DEPTH):
        values = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [value for value in values if isinstance(value, dict | list)]
    if level:
        raise Refusal("invalid_request", f"the body is nested deeper than {MAX_BODY_DEPTH} levels")
    return body


def json_response(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@dataclass
class ResponseStream:
    """A response of server-sent events."""

    response: web.StreamResponse
    numbers_events: bool
    """Whether each event carries a sequence number."""
    sent: int = 0

    async def send(self, *events: StreamEvent) -> None:
        for data, name in events:
            number = {"sequence_number": self.sent} if self.numbers_events else {}
            head = f"event: {name}\n".encode() if name else b""
            await self.response.write(head + b"data: " + orjson.dumps(data | number) + b"\n\n")
            self.sent += 1
