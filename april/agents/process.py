"""An agents process, `april agents`: gateway, program runner and broker link, wired together.

Without a program or command, an external harness takes the sessions over HTTP, runs its own agents and reports rewards.
"""

import asyncio
import logging
import signal
import ssl
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NoReturn

from aiohttp import web

from april.agents import PROGRAMS
from april.agents.agents import Agents
from april.agents.conversation_tree import Refusal
from april.agents.forwarding import SessionForwarder
from april.agents.gateway import Gateway, json_response, read_body
from april.agents.host import StartProgram
from april.agents.link import BrokerLink
from april.agents.listening import AttachKey, attach_keyfile, listen, server_tls
from april.agents.programs import CommandRunner, NotStarted, ProgramObserver, ProgramRunner
from april.agents.rendering import Renderer
from april.config import Config
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.util.files import keep_private
from april.util.lifetime import REFUSED, exit_at_once
from april.util.logs import log_to_stderr
from april.wire.security.keys import Keys, load_keys
from april.wire.sockets.broker import AccessDenied, BrokerConnection, new_uid

log = logging.getLogger(__name__)


def run_agents(config: Config, address: str, name: str) -> NoReturn:
    """Run the agents process `name` for the broker at `address` until the run is over, then exit. Raises ConfigError
    before it starts."""
    if not config.agent.is_set:
        refuse("agent.program", "", "leaves nothing to an agents process", "name a program or a command")
    if config.agent.program:
        PROGRAMS.find(config.agent.program)
    keep_private(config.run_dir)
    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    keys = load_keys(config.keys, "agents")
    tls, attach_key = server_tls(config.agent), AttachKey(attach_keyfile(config))
    exit_at_once(asyncio.run(serve(config, address, name, keys, tls, attach_key)))


async def serve(
    config: Config, address: str, name: str, keys: Keys | None, tls: ssl.SSLContext | None, attach_key: AttachKey
) -> int:
    """Run the gateway, the program runner and the link to the broker at `address` until the run is over; returns the
    exit status. `name`: that of this process. `keys`: its CURVE keys; None in a run without keys. `tls`: of the
    gateway; None: plain HTTP. `attach_key`: the key that an external harness has to show, if one is set."""
    section, tokenizer = config.agent, Tokenizer(config.model.path)
    gateway = Gateway.of(config, tokenizer)
    agents = Agents(section, gateway, Renderer.of(config, tokenizer))
    if section.program:
        agents.runner = ProgramRunner(section.program, section.options, section.sessions, agents)
    elif section.command:
        agents.runner = CommandRunner(section.command, config.run_dir / "logs" / f"{name}-programs.log", agents)
    else:
        agents.runner = AttachedRunner(agents, gateway, attach_key)
    http = web.AppRunner(gateway.app, access_log=None, handler_cancellation=True)
    await http.setup()
    try:
        agents.addresses = await listen(http, section, tls)
        gateway.forwarder = forwarder = SessionForwarder(section, agents.addresses)
        await agents.runner.start()
    except OSError as error:
        print(f"april agents: key 'agent.listen' = {section.listen!r}: {error.strerror}", file=sys.stderr)
        return REFUSED
    except NotStarted as error:
        program = section.program or " ".join(section.command)
        print(f"april agents: the process of the program {program!r} did not start: {error}", file=sys.stderr)
        return 1
    log.info("the API is at %s; connecting to %s", agents.addresses.public, address)
    connection = BrokerConnection(address, "agents", name, new_uid(name), config.broker.patience_s, keys)
    agents.link = BrokerLink(connection, section.sessions, agents.addresses.peer, agents)
    forwarder.ask_broker, gateway.images.keep = agents.link.find_holder, agents.link.keep_image
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, agents.link.leave, f"signal {signal.Signals(number).name}"
        )
    agents.link.start()
    await agents.stopped.wait()
    log.info("stopping: %s; %d sessions closed", agents.link.stopping, agents.completed)
    ignored = sum((dialect.ignored for dialect in gateway.dialects), Counter())
    log.info(
        "answers by status: %s; refused: %s; ignored: %s",
        dict(gateway.counts), dict(gateway.refusals) or "nothing", dict(ignored) or "nothing",
    )  # fmt: skip
    await agents.runner.close()
    await http.cleanup()
    await forwarder.close()
    agents.link.join()
    if agents.link.failure:
        print(f"april agents: {agents.link.failure}", file=sys.stderr)
        return REFUSED if isinstance(agents.link.failure, AccessDenied) else 1
    if agents.failure:
        print(f"april agents: {agents.failure}", file=sys.stderr)
        return 1
    return 0


# --- sessions for an external harness ---------------------------------------------------------------------------------

MAX_WAIT_S = 60.0
"""Longest time that one request for a session may wait (seconds): the upper bound of its `wait_s`."""


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
        self.gateway.attach_key = self.attach_key
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
