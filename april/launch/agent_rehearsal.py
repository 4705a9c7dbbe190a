"""An agent's program is run once before a run starts: for a row, against a policy that says the reference answer."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from april import wire
from april.agents.gateway import Gateway, task_of
from april.agents.host import Begin
from april.agents.programs import CommandRunner, ProgramRunner, Runner
from april.agents.rendering import Renderer
from april.agents.session import AgentSession
from april.config import Config
from april.data.tokenizer import Tokenizer
from april.launch.rows import Seen
from april.wire.rows import chunk_row
from april.wire.version import Version

KEY = 1
NO_GROUP = -1
"""by which a program can tell that no sample comes of it"""
FIRST_S = 60.0
"""longest wait for a program that has asked nothing yet; afterwards it may be right that it takes long"""
POLL_S = 0.02
LOG_CHARACTERS = 2000


@dataclass
class Ending:
    """How it went; also what the runner tells of it."""

    turns: int = 0
    """that the program had answered"""
    reward: float | None = None
    error: str = ""
    over: bool = False
    """otherwise it was still at work"""

    def began(self, key: int) -> None:
        pass

    def ended(self, key: int, reward: float | None, error: str, state: bytes = b"") -> None:
        self.reward, self.error = reward, error
        self.over = True

    def died(self, keys: list[int], why: str) -> None:
        self.ended(KEY, None, why)

    def broken(self, why: str) -> None:
        self.ended(KEY, None, why)


def run_once(config: Config, tokenizer: Tokenizer, one: Seen, patience_s: float) -> Ending:
    """`patience_s`: for a program that has asked something."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "programs.log")
        ending = asyncio.run(converse(config, tokenizer, one, log, patience_s))
        if ending.error and log.exists():
            ending.error = (
                f"{ending.error.partition('; ')[0]}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:].strip()}"
            )
    return ending


async def converse(config: Config, tokenizer: Tokenizer, one: Seen, log: Path, patience_s: float) -> Ending:
    from aiohttp import web

    from april.agents.dialects import DIALECTS

    section, ending = config.agent, Ending()
    gateway = Gateway([dialect(tokenizer, config.run.name, section.overrides == "ignore") for dialect in DIALECTS])
    options = config.data.template_options
    renderer = Renderer(tokenizer, section.chat_template, options, section.response_template)
    prompt = orjson.dumps(one.row.prompt).decode()
    told = wire.Session(
        KEY, NO_GROUP, 0, False, prompt, one.row.label, config.sampling.max_response_tokens, config.sampling.temperature
    )
    answer = np.append(tokenizer.encode_prompt(one.row.label), np.int32(tokenizer.end_of_text))

    def say(lease_id: int, start: int, tokens: np.ndarray, request: wire.TurnRequest, parent: int) -> None:
        ids = answer[: request.max_tokens].astype("<i4")
        payload = ids.tobytes() + bytes(4 * len(ids))
        row = chunk_row(lease_id, start + len(tokens), len(ids), Version(0, 0), "stop", payload)
        asyncio.get_running_loop().call_soon(session.hear, [(row, payload)])
        ending.turns += 1

    session = AgentSession(told, renderer, say, section.max_turn_tokens, section.history == "template")
    http = web.AppRunner(gateway.app, access_log=None, handler_cancellation=True)
    await http.setup()
    await web.TCPSite(http, "127.0.0.1", 0).start()
    runner: Runner = (
        ProgramRunner(section.program, section.options, 1, ending)
        if section.program
        else CommandRunner(section.command, log, ending)
    )
    try:
        await runner.start()
        base_url = f"http://127.0.0.1:{http.addresses[0][1]}/v1"
        runner.begin(Begin(KEY, base_url, gateway.admit(session), task_of(session), False, base_url))
        began = time.monotonic()
        while not ending.over and time.monotonic() - began < (patience_s if ending.turns else FIRST_S):
            await asyncio.sleep(POLL_S)
    except (TimeoutError, asyncio.IncompleteReadError):
        ending.ended(KEY, None, "its process ended at its start")
    finally:
        await runner.close()
        await http.cleanup()
    return ending
