"""An agents process, `april agents`: gateway, program runner and broker link, wired together."""

import asyncio
import logging
import signal
import ssl
import sys
from collections import Counter
from typing import NoReturn

from april.agents import PROGRAMS
from april.agents.listening import AttachKey, listen, server_tls
from april.config import Config
from april.connections.broker import AccessDenied, BrokerConnection
from april.connections.identity import new_uid
from april.errors import refuse
from april.processes.lifetime import REFUSED, end
from april.processes.logs import log_to_stderr
from april.security.keys import Keys, load_keys

log = logging.getLogger(__name__)


def run_agents(config: Config, address: str, name: str) -> NoReturn:
    """Run agents for the broker at `address` until the run is over, then exit. Raises ConfigError before it starts."""
    if not config.agent.is_set:
        refuse("agent.program", "", "leaves nothing to an agents process", "name a program or a command")
    if config.agent.program:
        PROGRAMS.find(config.agent.program)
    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    keys = load_keys(config.security.keys, "agents")
    tls, attach_key = server_tls(config.agent), AttachKey(config.agent.attach_keyfile)
    end(asyncio.run(serve(config, address, name, keys, tls, attach_key)))


async def serve(
    config: Config, address: str, name: str, keys: Keys | None, tls: ssl.SSLContext | None, attach_key: AttachKey
) -> int:
    """Serve until the run is over; returns the exit status."""
    from aiohttp import web

    from april.agents.agents import Agents
    from april.agents.attached import AttachedRunner
    from april.agents.dialects import DIALECTS
    from april.agents.elsewhere import SessionForwarder
    from april.agents.gateway import Gateway
    from april.agents.link import BrokerLink
    from april.agents.programs import CommandRunner, ProgramRunner
    from april.agents.rendering import Renderer
    from april.data.tokenizer import Tokenizer

    section, tokenizer = config.agent, Tokenizer(config.model.path)
    ignore_overrides = section.overrides == "ignore"
    gateway = Gateway([dialect(tokenizer, config.run.name, ignore_overrides) for dialect in DIALECTS])
    options = config.data.template_options
    renderer = Renderer(tokenizer, section.chat_template, options, section.response_template)
    agents = Agents(section, gateway, renderer)
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
    except (TimeoutError, asyncio.IncompleteReadError):
        print(f"april agents: the process of agent.program = {section.program!r} did not start", file=sys.stderr)
        return 1
    log.info("the API is at %s; connecting to %s", agents.addresses.public, address)
    connection = BrokerConnection(address, "agents", name, new_uid(name), config.broker.patience_s, keys)
    agents.link = BrokerLink(connection, section.sessions, agents.addresses.peer, agents)
    forwarder.ask_broker = agents.link.find_holder
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
