"""Runs an agent's program once before a run starts, on one row, against a policy that replies with the label."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from april import wire
from april.agents.gateway import Gateway, task_of
from april.agents.host import StartProgram
from april.agents.programs import CommandRunner, ProgramRunner, Runner
from april.agents.rendering import Renderer
from april.agents.session import ConversationTree
from april.config import Config
from april.data.tokenizer import Tokenizer
from april.launch.rows import InspectedRow
from april.wire.rows import chunk_row
from april.wire.version import Version

KEY = 1
NO_GROUP = -1
"""Group id that tells a program that this session is no sample of a run."""
FIRST_REQUEST_S = 60.0
"""Longest wait for the program's first request; after that, its own work may legitimately take long."""
AGENT_POLL_S = 0.02
LOG_CHARACTERS = 2000


@dataclass
class AgentOutcome:
    """Outcome of the session; implements the callbacks of the runner."""

    turns: int = 0
    """Requests of the program that were answered."""
    reward: float | None = None
    error: str = ""
    is_over: bool = False
    """Whether the program has ended; otherwise it was still running at the end of the wait."""

    def program_started(self, key: int) -> None:
        pass

    def program_ended(self, key: int, reward: float | None, error: str, state: bytes = b"") -> None:
        self.reward, self.error = reward, error
        self.is_over = True

    def process_died(self, keys: list[int], why: str) -> None:
        self.program_ended(KEY, None, why)

    def runner_failed(self, why: str) -> None:
        self.program_ended(KEY, None, why)


def run_agent_once(config: Config, tokenizer: Tokenizer, inspected: InspectedRow, patience_s: float) -> AgentOutcome:
    """Run the program on one row. `patience_s`: longest wait for its end once it has made a request."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "programs.log")
        outcome = asyncio.run(run_session(config, tokenizer, inspected, log, patience_s))
        if outcome.error and log.exists():
            outcome.error = (
                f"{outcome.error.partition('; ')[0]}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:].strip()}"
            )
    return outcome


async def run_session(
    config: Config, tokenizer: Tokenizer, inspected: InspectedRow, log: Path, patience_s: float
) -> AgentOutcome:
    from aiohttp import web

    from april.agents.dialects import DIALECTS

    section, outcome = config.agent, AgentOutcome()
    gateway = Gateway([dialect(tokenizer, config.run.name, section.overrides == "ignore") for dialect in DIALECTS])
    options = config.data.template_options
    renderer = Renderer(tokenizer, section.chat_template, options, section.response_template)
    prompt = orjson.dumps(inspected.dataset_row.prompt).decode()
    description = wire.AgentSession(
        KEY,
        NO_GROUP,
        0,
        False,
        prompt,
        inspected.dataset_row.label,
        config.sampling.max_response_tokens,
        config.sampling.temperature,
    )
    answer = np.append(tokenizer.encode_prompt(inspected.dataset_row.label), np.int32(tokenizer.end_of_text))

    def say(lease_id: int, start: int, tokens: np.ndarray, request: wire.TurnRequest, parent: int) -> None:
        ids = answer[: request.max_tokens].astype("<i4")
        payload = ids.tobytes() + bytes(4 * len(ids))
        row = chunk_row(lease_id, start + len(tokens), len(ids), Version(0, 0), "stop", payload)
        asyncio.get_running_loop().call_soon(session.receive_rows, [(row, payload)])
        outcome.turns += 1

    session = ConversationTree(description, renderer, say, section.max_turn_tokens, section.history == "template")
    http = web.AppRunner(gateway.app, access_log=None, handler_cancellation=True)
    await http.setup()
    await web.TCPSite(http, "127.0.0.1", 0).start()
    runner: Runner = (
        ProgramRunner(section.program, section.options, 1, outcome)
        if section.program
        else CommandRunner(section.command, log, outcome)
    )
    try:
        await runner.start()
        base_url = f"http://127.0.0.1:{http.addresses[0][1]}/v1"
        runner.start_program(StartProgram(KEY, base_url, gateway.admit(session), task_of(session), False, base_url))
        began = time.monotonic()
        while not outcome.is_over and time.monotonic() - began < (patience_s if outcome.turns else FIRST_REQUEST_S):
            await asyncio.sleep(AGENT_POLL_S)
    except (TimeoutError, asyncio.IncompleteReadError):
        outcome.program_ended(KEY, None, "its process ended at its start")
    finally:
        await runner.close()
        await http.cleanup()
    return outcome
