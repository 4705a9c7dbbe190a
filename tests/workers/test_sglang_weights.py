"""Weight updates of a running SGLang server: every transfer, every pause mode, and a server with wrong weights."""

import json
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from april.config import WeightsSection
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.weights.snapshot import checksums_in_server, joined
from april.wire.message import Version
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, V1, V2, VOCABULARY, Stream, drive, join, prompt
from april.workers.engines.sglang.channel import ServerWeightChannel, ServerWeightLoader
from april.workers.engines.sglang.client import ServerSilent
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.server import ServerFailed
from april.workers.engines.sglang.weights import DiskSnapshot, LocalTensors
from tests.support.server_faults import rest_of, run_until, streams_of
from tests.support.true_logprobs import assert_true

pytestmark = [pytest.mark.timeout(900), pytest.mark.sglang]
PATIENCE_S = 120.0


@pytest.fixture
def learner(attach_engine):
    """(publish, engine, receiver): of a publisher whose lane the server itself has joined, over which the model goes in
    several buckets; the engine that watches over the server; and its worker's side of the lane."""
    engine = attach_engine()
    publisher = WeightPublisher(WeightsSection(publish_deadline_s=PATIENCE_S), "test", "cpu")
    publisher.bucket_bytes = 20_000
    receiver = WeightReceiver(
        WeightsSection(), "uid", "w0", "cpu", server=ServerWeightChannel(engine), up=lambda: engine.ready
    )
    receiver.connect(publisher.address)

    def publish(version, tensors, chunks=None):
        """`chunks`, then all chunks of the engine until its worker has loaded or refused the version."""
        thread = threading.Thread(target=publisher.publish, args=(version, tensors))
        thread.start()
        chunks, deadline = [] if chunks is None else chunks, time.monotonic() + PATIENCE_S
        while (staged := receiver.take()) is None and time.monotonic() < deadline:
            chunks += engine.step()
        try:
            engine._loop.run_until_complete(engine.update_from_broadcast(staged.version, staged.manifest, staged.post))
            receiver.loaded(staged.version)
        except EngineError as error:
            receiver.refuse(str(error))
            raise
        finally:
            thread.join()
        return chunks

    yield publish, engine, receiver
    receiver.close()
    publisher.close()


@contextmanager
def checked_weights(engine):
    """Checksums that the server reports of its tensors."""
    answers = []

    async def ask():
        client = engine.make_client()
        answers.append(await client.call("/weights_checker", {"action": "checksum"}))
        await client.close()

    import asyncio

    asyncio.run(ask())
    yield answers[0]["ranks"][0]["checksums"]


@pytest.mark.parametrize("way", [DiskSnapshot, LocalTensors])
@pytest.mark.parametrize(("pause", "stream_tokens"), [("abort", 5), ("retract", 1)])
def test_running_requests_survive_an_update(attach_engine, tiny_model, way, pause, stream_tokens):
    models = {V0: tiny_model(seed=0), V1: tiny_model(seed=1)}
    engine = attach_engine(push=way(tiny_model().folder), pause=pause, stream_tokens=stream_tokens)
    engine.load_weights(V0, models[V0].weights())
    requests = [Request(i, prompt(3 + i, seed=i), 600, seed=i) for i in range(6)]
    before = drive(engine, requests, tokens=150, begun=range(6))
    engine.load_weights(V1, models[V1].weights())
    after = drive(engine, tokens=300)
    rest = streams_of(engine.cancel_all(range(6)))
    for request in requests:
        stream = join(before[request.id], after[request.id], rest.get(request.id, Stream([])))
        assert set(stream.versions) == {V0, V1}
        assert stream.versions == sorted(stream.versions)
        assert_true(models, request, stream)
    with checked_weights(engine) as held:
        assert held == {k: v for k, v in checksums_in_server(models[V1].weights()).items() if k in held} and held


def test_the_learner_broadcasts_to_the_server_itself(learner, tiny_model, monkeypatch):
    publish, engine, _ = learner
    models = {V0: tiny_model(seed=0), V1: tiny_model(seed=1), V2: tiny_model(seed=2)}
    calls = calls_of(engine, monkeypatch)
    publish(V0, models[V0].weights())
    request = Request(1, prompt(), 600, seed=1)
    parts = [drive(engine, [request], tokens=50)]
    for version in (V1, V2):
        chunks = publish(version, models[version].weights())
        assert engine.version == version
        parts.append(drive(engine, tokens=50))
        parts[-2] = join_with(parts[-2][1], chunks)
    stream = join(parts[0], parts[1], parts[2][1], drive(engine)[1])
    assert len(stream.tokens) == 600 and set(stream.versions) == {V0, V1, V2}
    assert_true(models, request, stream)
    assert calls.count("/update_weights_from_distributed") >= 3 * 4


def refuse_the_second_bucket(engine, monkeypatch):
    call, sent = engine._client.call, []

    async def changed(path, body=None, *arguments, **options):
        if path == "/update_weights_from_distributed":
            sent.append(path)
            body = body | {"group_name": "another"} if len(sent) == 2 else body
        return await call(path, body, *arguments, **options)

    monkeypatch.setattr(engine._client, "call", changed)


def tear_the_second_bucket(engine, monkeypatch):
    sent = []

    def torn(snapshot, heads):
        sent.append(heads)
        if len(sent) == 2:
            raise RuntimeError("the learner's side is gone")
        return joined(snapshot, heads)

    monkeypatch.setattr("april.weights.snapshot.joined", torn)


@pytest.mark.parametrize("harm", [refuse_the_second_bucket, tear_the_second_bucket])
def test_a_broadcast_that_breaks_off_between_two_buckets_is_repeated(learner, tiny_model, monkeypatch, harm):
    """Nothing is generated with weights of two versions. This server is kept by others, so that nobody starts it anew:
    it is still within the change that broke off."""
    publish, engine, receiver = learner
    publish(V0, tiny_model().weights())
    request = Request(1, prompt(), 600, temperature=0.0)
    before, handed = drive(engine, [request], tokens=50)[1], []
    harm(engine, monkeypatch)
    with pytest.raises(EngineError, match="refuses /update_weights_from_distributed"):
        publish(V1, tiny_model(seed=1).weights(), handed)
    before = join_with(before, handed + engine.step())
    assert engine.version is None and engine.capacity == 0
    assert [key for key, _ in engine.failures()] == [1] and engine.live == 0
    loader = ServerWeightLoader(engine, receiver)
    run_until(lambda: engine.version == V1, engine, loader.load)
    rest = rest_of(request, before)
    after = drive(engine, [rest])[1]
    assert set(before.versions) == {V0} and set(after.versions) == {V1}
    assert_true({V1: tiny_model(seed=1)}, rest, after)


def join_with(stream, chunks):
    return type(stream)([*stream.chunks, *chunks])


def test_a_broadcast_of_another_model_is_refused_before_it_begins(learner, tiny_model):
    publish, engine, _ = learner
    publish(V0, tiny_model().weights())
    other = tiny_model().weights() | {"model.norm.weight": torch.zeros(47)}
    with pytest.raises(EngineError, match=r"\(47,\).*\(48,\)"):
        publish(V1, other)
    assert engine.version == V0 and len(drive(engine, [Request(1, prompt(), 5)])[1].tokens) == 5
    publish(V2, tiny_model(seed=2).weights())
    assert engine.version == V2


def test_a_server_of_another_model_is_refused_at_once(sglang_server, tiny_model, tmp_path):
    """By the architecture that it reports, and the folder it was started with, whatever was loaded since."""
    with pytest.raises(ServerFailed, match=r"model_type.*model\.path"):
        SGLangEngine(tiny_model("llama").folder, VOCABULARY, 640, url=sglang_server.url)
    shutil.copytree(tiny_model().folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    with pytest.raises(ServerFailed, match=r"vocab_size.*model\.path"):
        SGLangEngine(tmp_path, 64, 640, url=sglang_server.url)


def test_a_checksum_mismatch_with_the_sent_weights_is_detected(attach_engine, tiny_model, monkeypatch):
    """The engine treats its server as lost: nothing is generated with weights of an unknown version."""
    engine = attach_engine()
    truth = tiny_model().weights()
    monkeypatch.setattr(
        "april.workers.engines.sglang.engine.checksums_in_server",
        lambda tensors: checksums_in_server(tiny_model(seed=1).weights()),
    )
    with pytest.raises(EngineError, match="other weights"):
        engine.load_weights(V0, truth)
    assert engine.version is None and not engine.ready and engine.capacity == 0


def test_the_first_update_is_compared_also_after_a_refusal_or_a_restart(attach_engine, tiny_model, monkeypatch):
    engine, weights = attach_engine(), tiny_model().weights()

    async def refuse(*arguments):
        raise EngineError("no")

    for restarted in (False, True):
        if restarted:
            engine._mark_lost("it is gone")
            run_until(lambda: engine.ready, engine)
        calls = calls_of(engine, monkeypatch)
        with monkeypatch.context() as refusing, pytest.raises(EngineError, match="no"):
            refusing.setattr(engine._push, "load", refuse)
            engine.load_weights(V0, weights)
        for version in (V0, V1):
            engine.load_weights(version, weights)
            assert calls.count("/weights_checker") == 1


def test_a_missing_snapshot_folder_leaves_the_old_weights(attach_engine, tiny_model, monkeypatch):
    engine = attach_engine()
    engine.load_weights(V0, tiny_model().weights())
    whole = drive(engine, [Request(1, prompt(), 200, temperature=0.0)])[1]
    before = drive(engine, [Request(1, prompt(), 200, temperature=0.0)], tokens=20)
    monkeypatch.setattr("safetensors.torch.save_file", lambda tensors, file: shutil.rmtree(file.parent))
    with pytest.raises(EngineError, match="refuses /update_weights_from_disk"):
        engine.load_weights(V1, tiny_model(seed=1).weights())
    stream = join(before[1], drive(engine)[1])
    assert engine.version == V0 and stream.tokens == whole.tokens and set(stream.versions) == {V0}


def test_tokens_of_an_unknown_version_are_refused(attach_engine, tiny_model):
    mine, other = attach_engine(), attach_engine()
    mine.load_weights(V0, tiny_model().weights())
    other.load_weights(Version(7, 7), tiny_model(seed=1).weights())
    mine.submit(Request(1, prompt(), 50))
    while mine.live:
        mine.step()
    ((request, why),) = mine.failures()
    assert request == 1 and "somebody else" in why


def calls_of(engine, monkeypatch, answer=None):
    """Paths of all calls that the engine makes from now on, but for its load, which it asks for by time; `answer`
    replaces the server's answers."""
    paths, call = [], engine._client.call

    async def noted(path, *arguments, **options):
        if path != "/v1/loads":
            paths.append(path)
        return await (answer or call)(path, *arguments, **options)

    monkeypatch.setattr(engine._client, "call", noted)
    return paths


def test_refused_weights_interrupt_no_request(attach_engine, tiny_model, monkeypatch):
    engine = attach_engine()
    engine.load_weights(V0, tiny_model().weights())
    drive(engine, [Request(1, prompt(), 600)], tokens=20)
    calls = calls_of(engine, monkeypatch)
    with pytest.raises(EngineError, match="unknown"):
        engine.load_weights(V1, tiny_model().weights() | {"extra": torch.zeros(1)})
    assert calls == [] and engine.live == 1


def test_a_server_that_does_not_answer_an_abort_is_lost(attach_engine, tiny_model, monkeypatch):
    """The abort may arrive late, and would then hit later requests."""
    engine = attach_engine()
    engine.load_weights(V0, tiny_model().weights())
    parts = drive(engine, [Request(i, prompt(), 600, temperature=0.0) for i in (1, 2)], tokens=50)
    sampled = engine.generated_tokens

    async def silence(path, *arguments, **options):
        raise ServerSilent("the SGLang server does not answer")

    calls = calls_of(engine, monkeypatch, silence)
    cancelled = engine.cancel(1)
    rest = engine.step()
    assert calls == ["/abort_request"] and engine.live == 0 and not engine.ready and engine.version is None
    assert engine.failures() == [(2, "the SGLang server does not answer")]
    tokens = [len(chunk.tokens) for chunk in [*parts[1].chunks, *parts[2].chunks, *cancelled, *rest]]
    assert sum(tokens) == engine.generated_tokens >= sampled


def test_a_pause_that_keeps_the_cache_has_wrong_logprobs_and_is_not_the_default(attach_engine, tiny_model):
    """in_place keeps the cache of the old weights, so that later log-probabilities are of neither version."""
    models = {V0: tiny_model(seed=0), V1: tiny_model(seed=1)}
    engine = attach_engine(pause="in_place", stream_tokens=1)
    engine.load_weights(V0, models[V0].weights())
    request = Request(1, prompt(), 300, seed=1)
    before = drive(engine, [request], tokens=50)
    engine.load_weights(V1, models[V1].weights())
    stream = join(before[1], drive(engine)[1])
    assert len(stream.tokens) == 300 and stream.versions[0] == V0 and stream.versions[-1] == V1
    deviation = assert_true(models, request, stream, atol=float("inf"))
    assert deviation > 1e-3
    print(f"in_place: logprobs deviate by up to {deviation:.3f}")


def test_a_pause_that_leaves_versions_unknown_is_refused(tiny_model):
    with pytest.raises(EngineError, match="stream_tokens = 1"):
        SGLangEngine(tiny_model().folder, VOCABULARY, 640, url="http://127.0.0.1:1", pause="retract", stream_tokens=8)
