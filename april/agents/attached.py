"""Sessions for an external harness, which takes them over HTTP, runs its own agents and reports the rewards."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from aiohttp import web

from april.agents.gateway import Gateway, json_response, read_body
from april.agents.host import StartProgram
from april.agents.listening import AttachKey
from april.agents.programs import ProgramObserver
from april.agents.session import Refusal

MAX_WAIT_S = 60.0
"""Longest `wait_s` of one request for a session."""


@dataclass
class AttachedRunner:
    """A `Runner` that offers sessions over HTTP instead of running programs.

    POST   /v1/sessions           {"wait_s": 30} -> 201 with URLs, key and task of a session, or 204 if none came in
                                  time; authorized by the key of agent.attach_keyfile, if one is set
    POST   /v1/session/reward     {"reward": 1.0}; authorized by the session's key
    DELETE /v1/session            end the session; authorized by its key
    """

    observer: ProgramObserver
    gateway: Gateway
    attach_key: AttachKey
    offered: deque[StartProgram] = field(default_factory=deque)
    session_by_key: dict[str, int] = field(default_factory=dict)
    """Lease id of each session that a harness has taken, by its API key."""
    offer_added: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gateway.app.router.add_post("/v1/sessions", self._take)
        self.gateway.app.router.add_delete("/v1/session", self._end)

    async def start(self) -> None:
        pass

    def start_program(self, order: StartProgram) -> None:
        self.offered.append(order)
        self.offer_added.set()

    def cancel(self, key: int) -> None:
        self.offered = deque(order for order in self.offered if order.key != key)
        self.session_by_key = {
            api_key: lease_id for api_key, lease_id in self.session_by_key.items() if lease_id != key
        }

    async def close(self) -> None:
        self.offered.clear()

    async def _take(self, request: web.Request) -> web.Response:
        if not self.attach_key.accepts(self.gateway.key_of(request)):
            raise Refusal("invalid_api_key", "this key opens no sessions; show that of agent.attach_keyfile", 401)
        wait_s = (await read_body(request)).get("wait_s", 0) if request.can_read_body else 0
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise Refusal("invalid_value", f"'wait_s' = {wait_s!r} is not from 0 to {MAX_WAIT_S:g} seconds")
        try:
            async with asyncio.timeout(wait_s):
                while not self.offered:
                    self.offer_added.clear()
                    await self.offer_added.wait()
        except TimeoutError:
            return web.Response(status=204)
        order = self.offered.popleft()
        self.session_by_key[order.api_key] = order.key
        self.observer.program_started(order.key)
        url = order.public_url
        body = {"base_url": url, "root_url": url.removesuffix("/v1"), "api_key": order.api_key}
        return json_response(body | {"task": order.task, "replaying": order.replaying}, 201)

    async def _end(self, request: web.Request) -> web.Response:
        key = self.session_by_key.pop(self.gateway.key_of(request), None)
        self.gateway.session_of(request)
        if key is not None:
            self.observer.program_ended(key, None, "")
        return web.Response(status=204)
