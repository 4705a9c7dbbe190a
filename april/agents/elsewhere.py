"""Requests with the key of a session that another agents process holds: they are passed on to that process, and its
answer is passed back as it comes.

A key says which session it is of, and the broker says who holds that. What the key opens the holder alone decides.
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
from april.agents.listening import Addresses
from april.agents.session import Refusal
from april.config import AgentSection

KEY = re.compile(r"(\d{1,15})\.(\d{1,15})\.(\d{1,15})\.[\w-]+")
"""group, index, lease of its session, and a secret"""
PASSED_ON = "X-April-Passed-On"
"""a header of requests that come from another agents process, and go no further"""
NOT_PASSED = {
    "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
"""headers of a connection, not of a request"""
PASSED_BACK = ("Content-Type", "Cache-Control", "Content-Length")
CONNECT_S = 10.0
AGAIN_S = 1.0
"""until who cannot be reached is tried again, and the broker asked again"""
REACH_S = 60.0
"""longest trouble with the holder's address"""
LOOK_S = 15.0
"""how often the broker is asked who holds the session of a call that is open"""
QUESTIONS = 1024
"""to the broker that wait for an answer"""
KNOWN = 10_000
"""sessions whose holder is remembered"""
MOVED, OVER, UNREACHABLE = 409, 410, 503

Names = tuple[int, int, int]
"""group, index, lease of a session"""


def key_of_session(group: int, index: int, lease_id: int, secret: str) -> str:
    """The key of a session."""
    return f"{group}.{index}.{lease_id}.{secret}"


class Elsewhere:
    """elsewhere = Elsewhere(section, addresses)
    elsewhere.ask = link.ask                        # once there is a broker to be asked
    response = await elsewhere.answer(request, key)
    """

    def __init__(self, section: AgentSection, addresses: Addresses):
        self.own = addresses.own
        self.ask: Callable[[wire.Whose], None] | None = None
        """how the broker is asked; None while it is not"""
        self.known: dict[Names, str] = {}
        """where a session was last held"""
        self._waiting: dict[Names, asyncio.Future[wire.Holder]] = {}
        self._host = urlsplit(section.public_url).hostname
        """that certificates name; None: that of the address"""
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trusting(section)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            skip_auto_headers=["Accept-Encoding", "User-Agent"],
        )

    async def close(self) -> None:
        await self._client.close()

    def hear(self, holder: wire.Holder) -> None:
        """The broker's answer."""
        if future := self._waiting.pop((holder.group, holder.index, holder.lease_id), None):
            future.set_result(holder)

    async def answer(self, request: web.Request, key: str) -> web.StreamResponse:
        """What the holder of its session answers. Raises Refusal."""
        found = KEY.fullmatch(key)
        if not found:
            raise unknown()
        group, index, lease_id = map(int, found.groups())
        names, is_passed_on = (group, index, lease_id), PASSED_ON in request.headers
        body, patient_until = await request.read(), math.inf
        while True:
            address = self.known.get(names, "") or await self._holder(names)
            if address == self.own:
                raise unknown()
            if is_passed_on:
                raise unreachable()
            if response := await self._pass_on(request, body, names, address):
                return response
            now = asyncio.get_running_loop().time()
            patient_until = min(patient_until, now + REACH_S)
            if now >= patient_until:
                raise unreachable()
            await asyncio.sleep(AGAIN_S)

    async def _holder(self, names: Names) -> str:
        """The address of the process that has a session, once that is there. Raises Refusal."""
        while True:
            holder = await self._asked(names)
            if holder.state == "over":
                raise Refusal("session_over", "the session of this key is over", OVER)
            if holder.state == "moved":
                raise Refusal("session_moved", "another execution of this session's agent has taken its place", MOVED)
            if holder.address:
                self.known[names] = holder.address
                if len(self.known) > KNOWN:
                    del self.known[next(iter(self.known))]
                return holder.address
            await asyncio.sleep(AGAIN_S)

    async def _asked(self, names: Names) -> wire.Holder:
        future = self._waiting.get(names)
        if future is None:
            if self.ask is None or len(self._waiting) >= QUESTIONS:
                raise unreachable()
            future = self._waiting[names] = asyncio.get_running_loop().create_future()
            self.ask(wire.Whose(*names))
        return await asyncio.shield(future)

    async def _pass_on(
        self, request: web.Request, body: bytes, names: Names, address: str
    ) -> web.StreamResponse | None:
        """None if it has answered nothing. While it lasts the broker is asked now and then whether the session is still
        there: who holds it may be gone without a word."""
        begun: list[web.StreamResponse] = []
        passing = asyncio.create_task(self._pass(request, body, address, begun))
        looking = asyncio.create_task(self._look(names))
        gone: Refusal | None = None
        try:
            await asyncio.wait({passing, looking}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                response = passing.result()
                if response.status >= MOVED:
                    self.known.pop(names, None)
                return response
            looking.result()
        except aiohttp.ClientError:
            pass
        except Refusal as error:
            gone = error
        finally:
            passing.cancel()
            looking.cancel()
            await asyncio.gather(passing, looking, return_exceptions=True)
        self.known.pop(names, None)
        if begun and request.transport:
            request.transport.abort()
        elif gone:
            raise gone
        return begun[0] if begun else None

    async def _look(self, names: Names) -> None:
        """Raises Refusal once the session is held no more."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._holder(names)
            except Refusal as error:
                if error.status != UNREACHABLE:
                    raise

    async def _pass(
        self, request: web.Request, body: bytes, address: str, begun: list[web.StreamResponse]
    ) -> web.StreamResponse:
        """`begun`: gets the response as soon as it has begun."""
        async with self._client.request(
            request.method, address + request.path_qs.removeprefix("/v1"), data=body or None,
            headers=passed(request.headers), server_hostname=self._host if address.startswith("https:") else None,
        ) as answer:  # fmt: skip
            headers = {name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=headers)
            begun.append(response)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in NOT_PASSED} | {PASSED_ON: "1"}


def trusting(section: AgentSection) -> ssl.SSLContext | bool:
    """Of other agents processes, who have the certificate of the configuration, or one that the machine trusts."""
    if section.ssl_certfile is None:
        return True
    context = ssl.create_default_context()
    context.load_verify_locations(section.ssl_certfile)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def unknown() -> Refusal:
    return Refusal("invalid_api_key", "this key opens no session", 401)


def unreachable() -> Refusal:
    return Refusal(
        "session_elsewhere", "the process that has this session cannot be reached now; ask again", UNREACHABLE
    )
