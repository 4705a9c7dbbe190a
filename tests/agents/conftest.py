"""A gateway with a scripted policy behind it."""

import asyncio
import threading

import numpy as np
import openai
import pytest
from aiohttp import web

from april import wire
from april.agents.conversation_tree import ConversationTree
from april.agents.gateway import DIALECTS, Gateway
from april.agents.listening import AttachKey, listen, server_tls
from april.agents.process import AttachedRunner
from april.agents.rendering import Renderer
from april.data.tokenizer import Tokenizer
from april.wire.message import Version
from april.wire.rows import chunk_row
from tests.support.agent_gateway import PLAIN_HTTP, SESSION, TRUST

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Policy:
    """Answers each turn with the next scripted line, where a final $ stands for the end-of-text token; None: no
    answer."""

    def __init__(self, tokenizer, *lines, pieces=1):
        self.tokenizer, self.lines, self.pieces = tokenizer, list(lines), pieces
        self.requests, self.forks = [], []
        """Each turn's (start, observation text, TurnRequest), and its (fork, parent)."""

    def send_observation(self, lease_id, start, tokens, request, parent):
        self.requests.append((start, self.tokenizer.decode(tokens), request))
        self.forks.append((lease_id - self.session.lease.lease_id, parent))
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
            self.session.receive_rows([(row, payload)])
            start += len(piece)


class ProgramObserver:
    def __init__(self, outcomes):
        self.outcomes = outcomes

    def program_started(self, key):
        self.outcomes.append(("began", key))

    def program_ended(self, key, reward, error, state=b""):
        self.outcomes.append(("ended", key, reward, error))


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def meet(loop, policy_folder):
    """meet(*lines) -> (OpenAI client, policy, session, gateway) with the policy answering by those lines"""
    runners, clients = [], []

    def make(*lines, pieces=1, ignore_overrides=False, max_tokens=64, template=PLAIN, response_template=None,
             attached=False, by_tokens=False, section=PLAIN_HTTP, folder=policy_folder, images=None):  # fmt: skip
        tokenizer = Tokenizer(folder)
        policy = Policy(tokenizer, *lines, pieces=pieces)
        lease = wire.AgentSession(SESSION, 3, 1, False, '"12*3="', "63", max_tokens, 1.0)
        renderer = Renderer(tokenizer, template, {}, response_template or {})
        session = policy.session = ConversationTree(lease, renderer, policy.send_observation, None, by_tokens)
        gateway = Gateway([dialect(tokenizer, "run", ignore_overrides) for dialect in DIALECTS], images=images)

        if attached:
            make.outcomes = []
            make.runner = AttachedRunner(ProgramObserver(make.outcomes), gateway, AttachKey(section.attach_keyfile))

        async def serve():
            runner = web.AppRunner(gateway.app, handler_cancellation=True)
            await runner.setup()
            runners.append(runner)
            return await listen(runner, section, server_tls(section))

        make.addresses = asyncio.run_coroutine_threadsafe(serve(), loop).result()
        key = gateway.admit(session)
        http = openai.DefaultHttpxClient(verify=TRUST)
        url = make.addresses.local
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120, http_client=http)
        client.loop = loop
        clients.append(client)
        return client, policy, session, gateway

    yield make
    for client in clients:
        client.close()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
