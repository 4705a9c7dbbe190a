"""Requests that reach an agents process which does not hold their session."""

import asyncio
import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import anthropic
import numpy as np
import openai
import pytest

from april import wire
from april.agents import forwarding as module
from april.agents.forwarding import SessionForwarder
from april.config import AgentSection
from april.wire.message import Version
from april.wire.rows import chunk_row
from tests.support.agent_gateway import PLAIN_HTTP, SESSION, ask, over_tls
from tests.support.certificates import make_certificate
from tests.support.run_processes import wait_until


class Broker:
    """Answers every question for a holder with the state and address that the test has set."""

    def __init__(self):
        self.state, self.address, self.questions = "held", "", []

    def answer(self, forwarder, question):
        self.questions.append(question)
        holder = wire.Holder(question.group, question.index, question.lease_id, self.state, self.address)
        asyncio.get_running_loop().call_soon(forwarder.receive_holder, holder)


@pytest.fixture
def both(meet, loop):
    """both(*lines) -> (client of the holder, the same at another process, policy, session, broker)"""
    forwarders = []

    def make(*lines, section=PLAIN_HTTP, **more):
        broker = Broker()

        async def connect(gateway, addresses):
            gateway.forwarder = forwarder = SessionForwarder(section, addresses)
            forwarder.ask_broker = lambda question: broker.answer(forwarder, question)
            forwarders.append(forwarder)

        client, policy, session, holder = meet(*lines, section=section, **more)
        addresses = [meet.addresses]
        _, _, _, other = meet(section=section)
        addresses.append(meet.addresses)
        for gateway, own in zip((holder, other), addresses, strict=True):
            asyncio.run_coroutine_threadsafe(connect(gateway, own), loop).result()
        broker.address = addresses[0].peer
        make.address = addresses[1]
        return client, client.with_options(base_url=addresses[1].local), policy, session, broker

    yield make
    for forwarder in forwarders:
        asyncio.run_coroutine_threadsafe(forwarder.close(), loop).result()


def receive_tokens(client, session, start, ids, finish=""):
    payload = ids.tobytes() + bytes(4 * len(ids))
    row = chunk_row(SESSION, start, len(ids), Version(0, 0), finish, payload)
    client.loop.call_soon_threadsafe(session.receive_rows, [(row, payload)])


def text_of(stream):
    return next(text for chunk in stream if chunk.choices and (text := chunk.choices[0].delta.content))


def test_any_process_forwards_any_key_to_its_holder(both, caplog):
    client, other, policy, session, broker = both("5*3=", None)
    other.loop = client.loop
    assert ask(other, "12*3=", stop="=").choices[0].message.content == "5*3"
    stream = iter(ask(other, "12*3=", "5*3", "1+", stream=True))
    wait_until(lambda: len(policy.requests) > 1)
    ids = np.asarray(policy.tokenizer.encode_prompt("4567"), "<i4")
    receive_tokens(client, session, 11, ids[:2])
    assert text_of(stream) == "45", "before the turn is over"
    receive_tokens(client, session, 13, ids[2:], "stop")
    assert text_of(stream) == "67" and list(stream)
    with pytest.raises(openai.BadRequestError, match="'n' = 2"):
        ask(other, "12*3=", n=2)
    assert broker.questions == [wire.HolderRequest(3, 1, SESSION)], "it is remembered"
    request = urllib.request.Request(
        f"{other.base_url}session/reward", b'{"reward": 0.5}', {"Authorization": f"Bearer {client.api_key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.loads(response.read()) == {"reward": 0.5} and session.reward == 0.5
    assert client.api_key not in caplog.text


def test_processes_reach_one_another_over_tls(both, tmp_path):
    certificate, key = make_certificate(tmp_path)
    client, _, _, _, _ = both("11", section=AgentSection(ssl_certfile=certificate, ssl_keyfile=key))
    with over_tls(client, both.address.public, certificate) as other:
        assert ask(other, "12*3=").choices[0].message.content == "11"


def test_an_invalid_key_is_refused_in_the_form_of_the_api(both):
    client, other, _, _, broker = both()
    group, index, lease_id, secret = client.api_key.split(".")
    forged = other.with_options(api_key=f"{group}.{index}.{lease_id}.{secret[::-1]}")
    with pytest.raises(openai.AuthenticationError, match="opens no session"):
        ask(forged, "12*3=")
    with pytest.raises(openai.AuthenticationError, match="opens no session"):
        ask(other.with_options(api_key="of-nobody"), "12*3=")
    elsewhere = other.with_options(api_key=f"{group}.{index}.{int(lease_id) + wire.MAX_FORKS}.{secret}")
    broker.state, broker.address = "moved", ""
    with pytest.raises(openai.ConflictError):
        ask(elsewhere, "12*3=")
    broker.state = "over"
    anthropics = anthropic.Anthropic(
        base_url=both.address.local.removesuffix("/v1"), api_key=elsewhere.api_key, max_retries=0
    )
    with pytest.raises(anthropic.APIStatusError, match=r"session .*over") as raised:
        anthropics.messages.create(model="any", max_tokens=8, messages=[{"role": "user", "content": "12*3="}])
    assert raised.value.status_code == 410 and raised.value.body["type"] == "error"


def test_a_body_is_not_read_before_its_key_is_known(both):
    """The headers announce a body that never comes: whoever has no key is refused without it, at every process."""
    client, other, _, _, _ = both()
    group, index, lease_id, secret = client.api_key.split(".")
    for base_url in (client.base_url, other.base_url):
        for key in ("of-nobody", f"{group}.{index}.{lease_id}.{secret[::-1]}", ""):
            with socket.create_connection((base_url.host, base_url.port), timeout=60) as connection:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {base_url.host}\r\nAuthorization: Bearer {key}\r\n"
                connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode())
                assert connection.recv(64).startswith(b"HTTP/1.1 401")


def test_a_call_waits_for_a_holder_that_comes_back_and_ends_with_one_that_does_not(both, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "RECHECK_S", 0.05)
    _, other, policy, _, broker = both("5*3=", None)
    address, broker.address = broker.address, ""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, other, "12*3=")
        for broker.address in ("", "http://127.0.0.1:9/v1", address):
            asked = len(broker.questions)
            wait_until(lambda asked=asked: len(broker.questions) > asked + 1 or answer.done())
        assert answer.result().choices[0].message.content == "5*3="
    stream = iter(ask(other, "1+", stream=True))
    wait_until(lambda: len(policy.requests) > 1)
    broker.state = "moved"
    with pytest.raises(openai.APIError):
        list(stream)
    with pytest.raises(openai.ConflictError):
        ask(other, "2+")
    monkeypatch.setattr(module, "UNREACHABLE_TIMEOUT_S", 0.0)
    broker.state, broker.address = "held", "http://127.0.0.1:9/v1"
    with pytest.raises(openai.InternalServerError, match="cannot be reached now"):
        ask(other, "2+")
