"""Forward requests for sessions of other agents processes to their holder, and stream the answer back.

A key names its session, and the broker says which process holds it. Only the holder checks the secret of the key.
"""

import asyncio
import math
import re
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from april import wire
from april.agents.conversation_tree import Refusal
from april.agents.listening import Addresses
from april.config import AgentSection

SESSION_KEY = re.compile(r"(\d{1,15})\.(\d{1,15})\.(\d{1,15})\.[\w-]+")
"""Regular expression for a session's API key: group, sample index and lease id of the session, and a secret."""
FORWARDED_HEADER = "X-April-Passed-On"
"""Header of requests that another agents process has forwarded; they are not forwarded again."""
HOP_BY_HOP_HEADERS = {
    "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "origin", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
"""Headers that belong to one connection and are not forwarded."""
RESPONSE_HEADERS = ("Content-Type", "Cache-Control", "Content-Length")
"""Headers of the holder's response that are passed back."""
CONNECT_S = 10.0
"""Timeout of a TCP connection to the holder."""
RETRY_S = 1.0
"""Pause before the broker is asked again and an unreachable holder is tried again."""
UNREACHABLE_TIMEOUT_S = 60.0
"""Time for which a holder may be unreachable before the request is refused (seconds)."""
RECHECK_S = 15.0
"""Interval at which the broker is asked whether the session of an open call still has a holder."""
MAX_PENDING_QUESTIONS = 1024
"""Most questions to the broker about a session's holder that may wait for an answer at once."""
MAX_KNOWN_HOLDERS = 10_000
"""Most sessions whose holder's address is cached."""
MOVED_STATUS, OVER_STATUS, UNREACHABLE_STATUS = 409, 410, 503
"""HTTP statuses of a superseded key, of an ended session and of a holder that does not answer."""

SessionId = tuple[int, int, int]
"""(group, index, lease id) of a session."""


def session_key(group: int, index: int, lease_id: int, secret: str) -> str:
    return f"{group}.{index}.{lease_id}.{secret}"


class SessionForwarder:
    """Finds the holder of a session and forwards requests to it.

    forwarder = SessionForwarder(section, addresses)
    forwarder.ask_broker = link.find_holder         # once the broker is connected
    response = await forwarder.forward(request, key)
    """

    def __init__(self, section: AgentSection, addresses: Addresses):
        self.own_address = addresses.peer
        self.ask_broker: Callable[[wire.HolderRequest], None] | None = None
        """Function that asks the broker which process holds a session; None without a connection."""
        self.holder_addresses: dict[SessionId, str] = {}
        """Cached base URL of each session's holder."""
        self._waiting: dict[SessionId, asyncio.Future[wire.Holder]] = {}
        self._host = urlsplit(section.public_url).hostname
        """Host name in the TLS certificates of other agents processes; None: the host of the address connected to."""
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=peer_tls(section)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            skip_auto_headers=["Accept-Encoding", "User-Agent"],
        )

    async def close(self) -> None:
        await self._client.close()

    def receive_holder(self, holder: wire.Holder) -> None:
        """Handle the broker's answer about which process holds a session."""
        if future := self._waiting.pop((holder.group, holder.index, holder.lease_id), None):
            future.set_result(holder)

    async def forward(self, request: web.Request, key: str) -> web.StreamResponse:
        """Forward a request to the process that holds the key's session, and stream its response back. Raises
        Refusal."""
        match = SESSION_KEY.fullmatch(key)
        if not match:
            raise unknown_key()
        group, index, lease_id = map(int, match.groups())
        session_id, is_forwarded = (group, index, lease_id), FORWARDED_HEADER in request.headers
        body, deadline = None if request.can_read_body else b"", math.inf
        while True:
            address = self.holder_addresses.get(session_id, "") or await self._holder_address(session_id)
            if address == self.own_address:
                raise unknown_key()
            if is_forwarded:
                raise holder_unreachable()
            if body is None and await self._accepts_key(request, session_id, address):
                body = await request.read()
            if body is not None and (response := await self._forward_once(request, body, session_id, address)):
                return response
            now = asyncio.get_running_loop().time()
            deadline = min(deadline, now + UNREACHABLE_TIMEOUT_S)
            if now >= deadline:
                raise holder_unreachable()
            await asyncio.sleep(RETRY_S)

    async def _accepts_key(self, request: web.Request, session_id: SessionId, address: str) -> bool:
        """Ask the session's holder, at the base URL `address`, whether it accepts the request's key, before the
        request's body is read; returns False if the holder cannot be reached. Raises Refusal."""
        headers, name = forwarded_headers(request.headers), self._server_name(address)
        try:
            async with self._client.get(
                f"{address}/session", headers=headers, server_hostname=name, timeout=aiohttp.ClientTimeout(CONNECT_S)
            ) as answer:
                if answer.status == 200:
                    return True
                refusal = KEY_REFUSALS.get(answer.status, holder_unreachable)
        except (aiohttp.ClientError, TimeoutError):
            refusal = None
        self.holder_addresses.pop(session_id, None)
        if refusal:
            raise refusal()
        return False

    def _server_name(self, address: str) -> str | None:
        """The host name that the certificate of the agents process at `address` has to have; None without TLS."""
        return self._host if address.startswith("https:") else None

    async def _holder_address(self, session_id: SessionId) -> str:
        """Base URL of the session's holder; waits until one is known. Raises Refusal if the session is over or
        moved."""
        while True:
            holder = await self._ask_once(session_id)
            if holder.state == "over":
                raise session_over()
            if holder.state == "moved":
                raise session_moved()
            if holder.address:
                self.holder_addresses[session_id] = holder.address
                if len(self.holder_addresses) > MAX_KNOWN_HOLDERS:
                    del self.holder_addresses[next(iter(self.holder_addresses))]
                return holder.address
            await asyncio.sleep(RETRY_S)

    async def _ask_once(self, session_id: SessionId) -> wire.Holder:
        future = self._waiting.get(session_id)
        if future is None:
            if self.ask_broker is None or len(self._waiting) >= MAX_PENDING_QUESTIONS:
                raise holder_unreachable()
            future = self._waiting[session_id] = asyncio.get_running_loop().create_future()
            self.ask_broker(wire.HolderRequest(*session_id))
        return await asyncio.shield(future)

    async def _forward_once(
        self, request: web.Request, body: bytes, session_id: SessionId, address: str
    ) -> web.StreamResponse | None:
        """Forward the request, whose body is `body`, once to the holder at the base URL `address`; returns the holder's
        response, or None if the holder sent nothing. Meanwhile the broker is asked every RECHECK_S whether the session
        still has a holder, because a holder can disappear without closing its connections."""
        started: list[web.StreamResponse] = []
        forwarding = asyncio.create_task(self._stream_response(request, body, address, started))
        watching = asyncio.create_task(self._watch_holder(session_id))
        lost: Refusal | None = None
        try:
            await asyncio.wait({forwarding, watching}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                response = forwarding.result()
                if response.status >= MOVED_STATUS:
                    self.holder_addresses.pop(session_id, None)
                return response
            watching.result()
        except aiohttp.ClientError:
            pass
        except Refusal as error:
            lost = error
        finally:
            forwarding.cancel()
            watching.cancel()
            await asyncio.gather(forwarding, watching, return_exceptions=True)
        self.holder_addresses.pop(session_id, None)
        if started and request.transport:
            request.transport.abort()
        elif lost:
            raise lost
        return started[0] if started else None

    async def _watch_holder(self, session_id: SessionId) -> None:
        """Ask the broker every RECHECK_S whether a process holds the session. Never returns; raises Refusal once none
        does."""
        while True:
            await asyncio.sleep(RECHECK_S)
            try:
                await self._holder_address(session_id)
            except Refusal as error:
                if error.status != UNREACHABLE_STATUS:
                    raise

    async def _stream_response(
        self, request: web.Request, body: bytes, address: str, started: list[web.StreamResponse]
    ) -> web.StreamResponse:
        """Send the request to the holder at the base URL `address`, and copy the holder's response to the client. The
        client's response object is appended to `started` before its first byte is sent."""
        async with self._client.request(
            request.method, address + request.path_qs.removeprefix("/v1"), data=body or None,
            headers=forwarded_headers(request.headers),
            server_hostname=self._server_name(address),
        ) as answer:  # fmt: skip
            headers = {name: answer.headers[name] for name in RESPONSE_HEADERS if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=headers)
            started.append(response)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP_HEADERS}
    return kept | {FORWARDED_HEADER: "1"}


def peer_tls(section: AgentSection) -> ssl.SSLContext | bool:
    """Client TLS towards other agents processes: trusts the configured certificate and those that the machine
    trusts."""
    if section.ssl_certfile is None:
        return True
    context = ssl.create_default_context()
    context.load_verify_locations(section.ssl_certfile)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def session_over() -> Refusal:
    return Refusal("session_over", "the session of this key is over", OVER_STATUS)


def session_moved() -> Refusal:
    return Refusal("session_moved", "another execution of this session's agent has taken its place", MOVED_STATUS)


def unknown_key() -> Refusal:
    return Refusal("invalid_api_key", "this key opens no session", 401)


def holder_unreachable() -> Refusal:
    return Refusal(
        "session_elsewhere", "the process that has this session cannot be reached now; ask again", UNREACHABLE_STATUS
    )


KEY_REFUSALS = {401: unknown_key, MOVED_STATUS: session_moved, OVER_STATUS: session_over}
"""HTTP status with which a holder answers for a bad key -> function that makes the Refusal for the client."""
