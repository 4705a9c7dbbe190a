"""A real SGLang server that dies, hangs, runs out of memory, or never comes up: no token is lost that was handed over,
every end has a sentence, and a second server goes on."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from april.config import BrokerSection, WeightsSection
from april.util import clock
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, V1, VOCABULARY, Stream, drive, join, prompt
from april.workers.engines.sglang import server as server_module
from april.workers.engines.sglang.channel import ServerWeightChannel, ServerWeightLoader
from april.workers.engines.sglang.client import ApiKeyRefused, ServerGone, ServerSilent
from april.workers.engines.sglang.engine import PROBE_TIMEOUT_S, SGLangEngine
from april.workers.engines.sglang.factory import api_key
from april.workers.engines.sglang.fleet import SGLangFleet
from april.workers.engines.sglang.requests import ABORT_S
from april.workers.engines.sglang.run import StepSignal
from april.workers.engines.sglang.server import ServerFailed, ServerSettings, SGLangServer
from tests.support.attached_servers import SGLANG_PYTHON
from tests.support.server_faults import (
    LONG,
    PATIENCE_S,
    assert_samples_survive,
    assert_whole_and_true,
    bring_back,
    kill_all,
    rest_of,
    run_until,
    send,
    streams_of,
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.sglang]
OPTIONS = {"slots": 16, "chunk_tokens": 16, "stream_tokens": 4}
LITTLE_MEMORY = {"max_total_tokens": 4000, "schedule_conservativeness": 0.01}
"""six of the longest requests fit; more are let in than fit to their ends"""


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def step_signal():
    return StepSignal()


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory, loop, step_signal):
    """An engine on its own server, which the tests harm."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    settings = ServerSettings(SGLANG_PYTHON, tiny_model().folder, log, slots=16, options=LITTLE_MEMORY)
    server = SGLangServer(settings)
    engine = SGLangEngine(
        tiny_model().folder, VOCABULARY, 640, server=server, loop=loop, step_signal=step_signal, **OPTIONS
    )
    yield engine
    engine.close()


@pytest.fixture
def fleet(held, tiny_model, sglang_server, loop, step_signal):
    """A fleet of the engine and another server, which stays unharmed."""
    options = OPTIONS | {"url": sglang_server.url}
    other = SGLangEngine(tiny_model().folder, VOCABULARY, 640, loop=loop, step_signal=step_signal, **options)
    other.load_weights(V0, tiny_model().weights())
    yield SGLangFleet([held, other], loop, step_signal)
    other.cancel_all(range(100))
    other.close()


def kill_scheduler(engine):
    send(engine, "scheduler", signal.SIGKILL)


def stop_scheduler(engine):
    send(engine, "scheduler", signal.SIGSTOP)


@pytest.mark.parametrize("harm", [kill_scheduler, stop_scheduler])
def test_a_server_that_dies_or_hangs_is_restarted_and_samples_continue(held, tiny_model, harm):
    assert_samples_survive(held, tiny_model(), lambda: harm(held), "SGLang server")


def test_a_stalled_worker_does_not_count_its_own_absence_as_the_server_s_silence(held, monkeypatch):
    now = clock.now()

    async def silence(path, deadline_s, until):
        changed.setattr(clock, "now", lambda: until)
        raise ServerSilent("no answer")

    for away_s, complaint in ((0.0, "no answer"), (60.0, None)):
        with monkeypatch.context() as changed:
            changed.setattr(clock, "now", lambda: now)
            changed.setattr(held._client, "call", partial(silence, until=now + PROBE_TIMEOUT_S + away_s))
            assert asyncio.run(held._diagnose()) == complaint


def test_of_two_servers_a_killed_one_loses_only_its_own_requests(fleet, tiny_model):
    """They continue on the other server; once the killed one is back with weights, it gets requests again."""
    first, second = fleet.engines
    for request in LONG:
        fleet.submit(request)
    assert first.live == second.live == 3, "each goes to the emptier one"
    its_own = {request.id for request in LONG if request.id in first}
    before = drive(fleet, tokens=240)
    kill_all(first)
    chunks, failures = run_until(lambda: not first.live, fleet)
    chunks += fleet.step()
    lost = {key for key, _ in failures + fleet.failures()}
    assert lost and lost <= its_own
    assert fleet.version == V0 and fleet.capacity == second.capacity > 0
    late = streams_of(chunks)
    for key in lost:
        fleet.submit(rest_of(LONG[key], join(before[key], late.get(key, Stream([])))))
        assert key in second
    rest, failures = run_until(lambda: not fleet.live, fleet)
    assert failures == []
    assert_whole_and_true({V0: tiny_model()}, LONG, before, streams_of(chunks + rest))
    bring_back(first, tiny_model())
    fleet.submit(LONG[0])
    fleet.submit(LONG[1])
    assert first.live == second.live == 1 and fleet.capacity == first.capacity + second.capacity


def test_of_two_servers_the_one_with_older_weights_gets_no_new_requests(fleet, tiny_model, monkeypatch):
    """Servers are updated one after the other: each token has the version of the server that sampled it."""
    first, second = fleet.engines
    models = {V0: tiny_model(), V1: tiny_model(seed=1)}
    for request in LONG[:4]:
        fleet.submit(request)
    interrupted = {request.id for request in LONG if request.id in first}
    before = drive(fleet, tokens=80, begun=interrupted)
    first.load_weights(V1, models[V1].weights())
    assert fleet.version == V1 and fleet.capacity == first.capacity + second.live
    for request in LONG[4:]:
        fleet.submit(request)
        assert request.id in first
    after = drive(fleet)
    for request in LONG[:4]:
        versions = [*before[request.id].versions, *after[request.id].versions]
        assert set(versions) == ({V0, V1} if request.id in interrupted else {V0})
    assert_whole_and_true(models, LONG, before, after)
    monkeypatch.setattr(first, "version", None)
    fleet.submit(LONG[0])
    assert fleet.version is None and fleet.live == 1 and first.live == second.live == 0
    monkeypatch.undo()
    assert len(drive(fleet)[0].tokens) == 600


def test_a_slow_weight_update_of_one_server_delays_no_other(fleet, tiny_model, monkeypatch):
    first, second = fleet.engines
    before = drive(fleet, LONG[:2], tokens=40)
    hung, call = asyncio.Event(), second._client.call

    async def hang(path, *arguments, **deadline):
        if path == "/pause_generation":
            await hung.wait()
        return await call(path, *arguments, **deadline)

    monkeypatch.setattr(second._client, "call", hang)
    change = second.begin(second.update_weights(V1, tiny_model(seed=1).weights()))
    meanwhile, _ = run_until(lambda: not first.live, fleet)
    assert not change.done() and 0 in streams_of(meanwhile) and second.live == 1
    hung.set()
    rest, failures = run_until(lambda: not fleet.live, fleet)
    assert failures == [] and change.result() is None and fleet.version == second.version == V1
    models = {V0: tiny_model(), V1: tiny_model(seed=1)}
    assert_whole_and_true(models, LONG[:2], before, streams_of(meanwhile + rest))


def test_an_abort_reaches_all_servers(fleet):
    before = drive(fleet, LONG, tokens=80)
    ended = fleet.cancel_all(range(6))
    assert fleet.live == 0 and {chunk.id for chunk in ended} <= set(range(6))
    handed = sum(len(before[i].tokens) for i in range(6)) + sum(len(chunk.tokens) for chunk in ended)
    assert 80 <= handed < 3600
    with pytest.raises(EngineError, match="vocabulary"):
        fleet.submit(replace(LONG[0], tokens=np.array([VOCABULARY], np.int32)))


def test_requests_beyond_a_server_s_memory_wait_and_lose_no_token(held, tiny_model):
    """Since they might end early, more are let in than its cache holds to their ends: some are retracted, and their
    cache is computed anew. Aborted in the middle of that, as those that wait, they go on later."""
    never, models = frozenset({VOCABULARY}), {V0: tiny_model()}
    requests = [Request(i, prompt(3 + i, seed=i), 600, seed=i, stop_token_ids=never) for i in range(16)]
    log = held._server.settings.log

    def submit_all():
        for request in requests:
            held.submit(request)

    at_first = log.read_bytes().count(b"Retract requests")
    submit_all()
    chunks, failures = run_until(lambda: not held.live, held)
    assert failures == [] and log.read_bytes().count(b"Retract requests") > at_first
    assert_whole_and_true(models, requests, {request.id: Stream([]) for request in requests}, streams_of(chunks))

    enough = held.generated_tokens + 1000
    submit_all()
    chunks, failures = run_until(lambda: held.generated_tokens >= enough, held)
    arrived = streams_of(chunks + held.cancel_all(range(16)))
    assert failures == [] and held.live == 0
    parts = {request.id: arrived.get(request.id, Stream([])) for request in requests}
    aborted = [request for request in requests if parts[request.id].finish_reason is None]
    for request in aborted:
        held.submit(rest_of(request, parts[request.id]))
    chunks, failures = run_until(lambda: not held.live, held)
    assert failures == [] and len(aborted) > 6
    assert_whole_and_true(models, requests, parts, streams_of(chunks))


def test_a_server_killed_before_the_first_bucket_loses_only_its_weight_channel(held, tiny_model, loop):
    """The learner trains on, and its next weight channel to that worker sends weights to the restarted server."""
    models = {V0: tiny_model(), V1: tiny_model(seed=1)}
    deadlines = WeightsSection(publish_deadline_s=PATIENCE_S, transfer_deadline_s=5.0)
    publisher = WeightPublisher(deadlines, "test", "cpu")
    receiver = WeightReceiver(deadlines, "uid", "w0", "cpu", server=ServerWeightChannel(held), up=lambda: held.ready)
    receiver.connect(publisher.address)
    loader, staged = ServerWeightLoader(held, receiver), []
    run_until(lambda: [channel.state for channel in publisher._channels.values()] == ["ready"], held)
    before = drive(held, LONG, tokens=240, begun=range(6))
    training = threading.Thread(target=publisher.publish, args=(V1, models[V1].weights()))
    training.start()
    chunks, _ = run_until(lambda: staged, held, lambda: staged.extend(filter(None, [receiver.take()])))
    with pytest.raises(EngineError, match="SGLang server"):
        loop.run_until_complete(
            held.update_from_broadcast(V1, staged[0].manifest, lambda: [kill_all(held), staged[0].post()])
        )
    receiver.refuse("its server is gone")
    training.join(PATIENCE_S)
    assert not training.is_alive()
    late, failures = run_until(lambda: held.version == V1, held, loader.load)
    parts = streams_of([chunk for r in LONG for chunk in before[r.id].chunks] + chunks + late)
    lost = {key for key, _ in failures}
    assert lost == {request.id for request in LONG if parts[request.id].finish_reason is None}
    after = drive(held, [rest_of(LONG[key], parts[key]) for key in lost])
    assert_whole_and_true(models, LONG, parts, after)
    receiver.close()
    publisher.close()


def test_a_frozen_server_delays_an_abort_no_longer_than_the_broker_waits(fleet, tiny_model, caplog):
    """The frozen server counts as lost, and the tokens of the others are returned in time."""
    first, second = fleet.engines
    sampled = fleet.generated_tokens
    for request in LONG:
        fleet.submit(request)
    before = drive(fleet, tokens=240, begun={request.id for request in LONG if request.id in first})
    os.killpg(first._server._process.pid, signal.SIGSTOP)
    chunks = fleet.cancel_all(request.id for request in LONG)
    assert "does not answer /abort_request within" in caplog.text and not first.ready and second.ready
    assert BrokerSection().abort_deadline_s > ABORT_S and fleet.live == 0
    given = [chunk for request in LONG for chunk in before[request.id].chunks] + chunks
    assert sum(len(chunk.tokens) for chunk in given) == fleet.generated_tokens - sampled
    bring_back(first, tiny_model())


def test_a_server_that_keeps_dying_is_given_up_with_a_sentence(fleet, loop, step_signal):
    """Other servers continue; if none is left, the worker ends."""
    first, _ = fleet.engines
    before = drive(fleet, LONG[:2], tokens=20)
    first.max_restarts = first.restarts
    kill_all(first)
    chunks, failures = run_until(lambda: first not in fleet._alive, fleet)
    rest, none = run_until(lambda: not fleet.live, fleet)
    assert [key for key, _ in failures] == [0] and none == []
    assert len(join(before[1], streams_of(chunks + rest)[1]).tokens) == 600
    with pytest.raises(EngineError, match="finished nothing in"):
        SGLangFleet([first], loop, step_signal).step()


# --- a server that never comes up ---


@pytest.fixture
def settings(tiny_model, tmp_path):
    return ServerSettings(SGLANG_PYTHON, tiny_model().folder, tmp_path / "server.log", slots=4, context_tokens=640)


def start(settings):
    SGLangEngine(settings.model, VOCABULARY, 640, server=SGLangServer(settings))


def test_a_port_that_is_taken_is_named(settings):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed, match=f"'engine.port' = {port}"):
            start(replace(settings, port=port))


def test_a_missing_installation_is_named_with_the_script_that_makes_it(settings, tmp_path):
    with pytest.raises(ServerFailed, match=r"launch/install-sglang\.sh"):
        start(replace(settings, python=tmp_path / "python"))


def test_a_model_that_sglang_cannot_run_is_refused_with_the_server_s_log(settings, tmp_path):
    shutil.copytree(settings.model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]}')
    with pytest.raises(ServerFailed, match=r"nonsense"):
        start(replace(settings, model=tmp_path))


def test_a_slow_start_ends_at_its_deadline_and_leaves_no_process(settings):
    server = SGLangServer(replace(settings, start_s=2.0))
    with pytest.raises(ServerFailed, match=r"engine\.start_s"):
        SGLangEngine(settings.model, VOCABULARY, 640, server=server)
    assert not server.alive


LOCKED = """
import http.server, json, os
words = json.loads(os.environ["APRIL_SERVER_OPTIONS"])
given = dict(zip(words, words[1:]))
class Locked(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + given["--api-key"] else 401)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Locked).serve_forever()
"""


class LockedSettings(ServerSettings):
    def program(self):
        return ["-c", LOCKED]


def test_a_wrong_api_key_ends_the_start_at_once(settings):
    options = {"api_key": "K"}
    settings = LockedSettings(Path(sys.executable), settings.model, settings.log, options=options)
    for key, said in (("", "an"), ("L", "another")):
        with pytest.raises(ApiKeyRefused, match=f"wants {said} API key"):
            SGLangEngine(settings.model, VOCABULARY, 640, server=SGLangServer(settings), api_key=key)
    engine = SGLangEngine(settings.model, VOCABULARY, 640, server=SGLangServer(settings), api_key=api_key(options))
    assert engine.ready
    engine.close()


def test_a_port_lost_before_the_server_binds_it_is_replaced(settings, monkeypatch):
    key = {"api_key": "K"}
    settings = LockedSettings(Path(sys.executable), settings.model, settings.log, options=key)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = [taken.getsockname()[1], server_module.free_port()]
        ports = iter(found)
        monkeypatch.setattr(server_module, "free_port", lambda: next(ports))
        server = SGLangServer(settings)
        engine = SGLangEngine(settings.model, VOCABULARY, 640, server=server, api_key=api_key(key))
        assert engine.ready and server.port == found[1]
        engine.close()


def test_an_external_server_must_answer_at_the_start(tiny_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ServerGone, match="cannot be reached"):
            SGLangEngine(tiny_model().folder, VOCABULARY, 640, url=url)
