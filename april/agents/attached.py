"""Agents that somebody else runs: a harness comes for a session, speaks for it, and says what it was worth."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from aiohttp import web

from april.agents.gateway import Gateway, answer, read_body
from april.agents.host import Begin
from april.agents.listening import AttachKey
from april.agents.programs import Audience
from april.agents.session import Refusal

LONGEST_WAIT_S = 60.0
"""of a harness for a session"""


@dataclass
class AttachedRunner:
    """Offers sessions over HTTP.

    POST   /v1/sessions           {"wait_s": 30} -> 201 with all that an agent is told, or 204: none in that time;
                                  with the key of agent.attach_keyfile, if there is one
    POST   /v1/session/reward     {"reward": 1.0}, with the session's key
    DELETE /v1/session            ends it, with its key
    """

    audience: Audience
    gateway: Gateway
    attach_key: AttachKey
    offered: deque[Begin] = field(default_factory=deque)
    taken: dict[str, int] = field(default_factory=dict)
    """session by key"""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gateway.app.router.add_post("/v1/sessions", self._take)
        self.gateway.app.router.add_delete("/v1/session", self._end)

    async def start(self) -> None:
        pass

    def begin(self, order: Begin) -> None:
        self.offered.append(order)
        self.news.set()

    def cease(self, key: int) -> None:
        self.offered = deque(order for order in self.offered if order.key != key)
        self.taken = {api_key: one for api_key, one in self.taken.items() if one != key}

    async def close(self) -> None:
        self.offered.clear()

    async def _take(self, request: web.Request) -> web.Response:
        if not self.attach_key.opens(self.gateway.key_of(request)):
            raise Refusal("invalid_api_key", "this key opens no sessions; show that of agent.attach_keyfile", 401)
        wait_s = (await read_body(request)).get("wait_s", 0) if request.can_read_body else 0
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= LONGEST_WAIT_S:
            raise Refusal("invalid_value", f"'wait_s' = {wait_s!r} is not from 0 to {LONGEST_WAIT_S:g} seconds")
        try:
            async with asyncio.timeout(wait_s):
                while not self.offered:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            return web.Response(status=204)
        order = self.offered.popleft()
        self.taken[order.api_key] = order.key
        self.audience.began(order.key)
        url = order.public_url
        told = {"base_url": url, "root_url": url.removesuffix("/v1"), "api_key": order.api_key}
        return answer(told | {"task": order.task, "replaying": order.replaying}, 201)

    async def _end(self, request: web.Request) -> web.Response:
        key = self.taken.pop(self.gateway.key_of(request), None)
        self.gateway.session_of(request)
        if key is not None:
            self.audience.ended(key, None, "")
        return web.Response(status=204)
