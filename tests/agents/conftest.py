"""A gateway that a test speaks with, against a policy that says what the test says."""

import asyncio
import threading
from importlib.util import find_spec

import numpy as np
import openai
import pytest
from aiohttp import web

from april import wire
from april.agents.attached import AttachedRunner
from april.agents.dialects import DIALECTS
from april.agents.gateway import Gateway
from april.agents.listening import AttachKey, listen, tls_of
from april.agents.rendering import Renderer
from april.agents.session import AgentSession
from april.config import AgentSection
from april.data.tokenizer import Tokenizer
from april.wire.rows import chunk_row
from april.wire.version import Version

SESSION = 7 * wire.BRANCHES
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
NEEDED = {"test_frameworks.py": ("agents", "langgraph", "langchain_openai"), "test_gymnasium.py": ("gymnasium",)}
collect_ignore = [name for name, packages in NEEDED.items() if not all(map(find_spec, packages))]
PLAINLY = AgentSection()


class Policy:
    """Answers each turn with the next of its lines, of which $ is the end of text; keeps what it was told."""

    def __init__(self, tokenizer, *lines, pieces=1):
        self.tokenizer, self.lines, self.pieces = tokenizer, list(lines), pieces
        self.told, self.places = [], []
        """what was said to it, and (branch, its parent) of each"""

    def say(self, lease_id, start, tokens, request, parent):
        self.told.append((start, self.tokenizer.decode(tokens), request))
        self.places.append((lease_id - self.session.told.lease_id, parent))
        line = self.lines.pop(0)
        if line is not None:
            asyncio.get_running_loop().call_later(0.01, self.answer, lease_id, start + len(tokens), line)

    def answer(self, lease_id, start, line):
        ids = self.tokenizer.encode_prompt(line.removesuffix("$"))
        if line.endswith("$"):
            ids = np.append(ids, np.int32(self.tokenizer.end_of_text))
        end = start + len(ids)
        for piece in np.array_split(ids, self.pieces):
            payload = piece.tobytes() + bytes(4 * len(piece))
            over = "stop" if start + len(piece) == end else ""
            row = chunk_row(lease_id, start, len(piece), Version(0, 0), over, payload)
            self.session.hear([(row, payload)])
            start += len(piece)


class Audience:
    def __init__(self, seen):
        self.seen = seen

    def began(self, key):
        self.seen.append(("began", key))

    def ended(self, key, reward, error, state=b""):
        self.seen.append(("ended", key, reward, error))


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def meet(loop, policy_folder):
    """meet(*lines) -> (client, policy, session, gateway)"""
    tokenizer, runners, clients = Tokenizer(policy_folder), [], []

    def begin(*lines, pieces=1, ignores=False, max_tokens=64, template=PLAIN, response_template=None, attached=False,
              rendered=False, section=PLAINLY):  # fmt: skip
        policy = Policy(tokenizer, *lines, pieces=pieces)
        told = wire.Session(SESSION, 3, 1, False, '"12*3="', "63", max_tokens, 1.0)
        renderer = Renderer(tokenizer, template, {}, response_template or {})
        session = policy.session = AgentSession(told, renderer, policy.say, None, rendered)
        gateway = Gateway([dialect(tokenizer, "run", ignores) for dialect in DIALECTS])

        if attached:
            begin.seen = []
            begin.runner = AttachedRunner(Audience(begin.seen), gateway, AttachKey(section.attach_keyfile))

        async def serve():
            runner = web.AppRunner(gateway.app, handler_cancellation=True)
            await runner.setup()
            runners.append(runner)
            return await listen(runner, section, tls_of(section))

        begin.addresses = asyncio.run_coroutine_threadsafe(serve(), loop).result()
        key = gateway.admit(session)
        client = openai.OpenAI(base_url=begin.addresses.near, api_key=key, max_retries=0, timeout=120)
        client.loop = loop
        clients.append(client)
        return client, policy, session, gateway

    yield begin
    for client in clients:
        client.close()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
