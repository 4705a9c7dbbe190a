"""What every generation engine keeps to, whichever it is. A new engine joins by an entry in ENGINES.

SGLang's server is the real one, and so is vLLM's where it is installed; where two runs are compared, they are greedy,
since engines differ in how they draw. SGLang pauses by `abort` here, its default; by `retract`, with stream_tokens = 1,
where requests are interrupted: by changes of weights, by the cancel of many, to be resumed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from april.version import Version
from april.workers.engines.base import EngineError, Request
from april.workers.engines.sglang import SGLangEngine
from april.workers.engines.torch_engine import TorchEngine
from april.workers.engines.vllm_engine import VLLMEngine
from tests.workers.conftest import VLLM_PYTHON
from tests.workers.engine_driving import (
    V0,
    V1,
    V2,
    VOCABULARY,
    Stream,
    assert_frequencies,
    assert_true_logprobs,
    drive,
    join,
    prompt,
    requests_of_many_shapes,
)

pytestmark = pytest.mark.timeout(900)
"""the first test on SGLang or vLLM starts its server"""


def start_torch(model, request, **options):
    return TorchEngine(model.folder, **options)


def attach_sglang(model, request, **options):
    url = request.getfixturevalue("sglang_server").url
    return SGLangEngine(model.folder, VOCABULARY, **{"max_context": 640, "stream_tokens": 5} | options, url=url)


def attach_retracting(model, request, **options):
    return attach_sglang(model, request, pause="retract", stream_tokens=1, **options)


def attach_vllm(model, request, **options):
    url = request.getfixturevalue("vllm_server").url
    return VLLMEngine(model.folder, VOCABULARY, **{"max_context": 640, "stream_tokens": 5} | options, url=url)


ENGINES = {"torch": start_torch, "sglang": attach_sglang} | ({"vllm": attach_vllm} if VLLM_PYTHON.exists() else {})
CUTTING = [engine for engine in ENGINES if engine != "vllm"]
"""that return log-probabilities of the whole distribution where top_k or top_p cuts it; vLLM refuses to cut"""
INTERRUPTED = ENGINES | {"sglang-retract": attach_retracting}


@pytest.fixture(params=ENGINES)
def make_engine(request, tiny_model):
    """make_engine(version=V0, **options) -> an engine that holds the weights of tiny_model()."""
    made = []

    def make(version: Version | None = V0, **options):
        options = {"slots": 8, "chunk_tokens": 7, "chunk_s": 1e9} | options
        engine = INTERRUPTED[request.param](tiny_model(), request, **options)
        made.append(engine)
        if version is not None:
            engine.load_weights(version, tiny_model().weights())
        return engine

    yield make
    for engine in made:
        engine.cancel_all(range(3000))
        engine.close()


def test_a_stream_has_no_gap_and_ends_once(make_engine):
    engine, requests = make_engine(), requests_of_many_shapes()
    streams = drive(engine, requests)
    assert set(streams) == {request.id for request in requests}
    for request in requests:
        stream = streams[request.id]
        assert len(stream.tokens) == len(stream.logprobs) == request.max_new_tokens
        assert [chunk.finish_reason for chunk in stream.chunks[:-1]] == [None] * (len(stream.chunks) - 1)
        assert stream.finish_reason == "length"
        for chunk in stream.chunks:
            assert chunk.tokens.dtype == np.int32 and chunk.logprobs.dtype == np.float32
            assert len(chunk.tokens) == len(chunk.logprobs) <= 7
    assert engine.generated_tokens == sum(len(stream.tokens) for stream in streams.values())
    assert engine.live == 0 and engine.step() == []


def test_handed_over_arrays_are_never_written_again(make_engine):
    engine = make_engine(chunk_tokens=3)
    streams = drive(engine, [Request(1, prompt(), 30, seed=1)])
    frozen = [(chunk.tokens.copy(), chunk.logprobs.copy()) for chunk in streams[1].chunks]
    drive(engine, [Request(2, prompt(), 30, seed=2)])
    for chunk, (tokens, logprobs) in zip(streams[1].chunks, frozen, strict=True):
        assert (chunk.tokens == tokens).all() and (chunk.logprobs == logprobs).all()


def test_more_requests_than_slots_all_finish(make_engine):
    engine = make_engine(slots=3)
    requests = requests_of_many_shapes(25)
    assert engine.slots == 3
    streams = drive(engine, requests)
    assert [len(streams[r.id].tokens) for r in requests] == [r.max_new_tokens for r in requests]


def test_long_and_short_sequences_side_by_side_have_true_logprobs(make_engine, tiny_model):
    lengths = [(3, 600), (150, 130), (1, 5), (126, 4), (127, 4), (128, 4), (129, 4), (300, 200), (40, 220), (8, 120)]
    requests = [Request(i, prompt(p, seed=i), r, seed=i) for i, (p, r) in enumerate(lengths)]
    streams = drive(make_engine(slots=4, chunk_tokens=100), requests)
    for request in requests:
        assert_true_logprobs(tiny_model(), request, streams[request.id])


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_behaviour_logprobs_are_those_of_a_plain_forward_pass(make_engine, tiny_model, temperature):
    requests = requests_of_many_shapes(12, temperature=temperature)
    streams = drive(make_engine(), requests)
    for request in requests:
        assert_true_logprobs(tiny_model(), request, streams[request.id])


@pytest.mark.parametrize("tokens", [0, 1, 7, 100])
def test_cancel_hands_over_what_is_left(make_engine, tokens):
    request = Request(1, prompt(), 500, temperature=0.0)
    whole = drive(make_engine(), [request])[1]
    engine = make_engine()
    before = drive(engine, [request, replace(request, id=2)], tokens=tokens)
    stream = join(before[1], Stream(engine.cancel(1)))
    assert stream.tokens == whole.tokens[: len(stream.tokens)] and stream.finish_reason is None
    assert tokens // 2 <= len(stream.tokens) < 500
    assert engine.cancel(1) == [] and engine.live == 1
    assert join(before[2], drive(engine)[2]).tokens == whole.tokens


@pytest.mark.parametrize("make_engine", INTERRUPTED, indirect=True)
def test_many_are_cancelled_at_once_and_the_others_go_on(make_engine):
    requests = [Request(i, prompt(seed=i), 300, temperature=0.0) for i in range(24)]
    whole = drive(make_engine(slots=24), requests)
    engine = make_engine(slots=24)
    before = drive(engine, requests, tokens=300)
    ended = engine.cancel_all(range(20))
    assert engine.live <= 4 and {chunk.id for chunk in ended} <= set(range(20))
    after = drive(engine)
    assert set(after) <= set(range(20, 24))
    for i in range(20):
        stream = join(before[i], Stream([chunk for chunk in ended if chunk.id == i]))
        assert stream.tokens == whole[i].tokens[: len(stream.tokens)]
        assert stream.finish_reason == (None if len(stream.tokens) < 300 else "length")
    assert all(join(before[i], after[i]).tokens == whole[i].tokens for i in range(20, 24))


@pytest.mark.parametrize("make_engine", INTERRUPTED, indirect=True)
@pytest.mark.parametrize("cuts", [[1], [5, 40, 90]])
def test_a_resumed_greedy_run_equals_the_uninterrupted_one(make_engine, tiny_model, cuts):
    request = Request(1, prompt(), 400, temperature=0.0)
    whole = drive(make_engine(), [request])[1]
    engine, segments, rest = make_engine(), [], request
    for tokens in [*cuts, None]:
        before = drive(engine, [rest], tokens=tokens)[1]
        segments.append(join(before, Stream(engine.cancel(1))))
        context = np.concatenate([rest.tokens, np.array(segments[-1].tokens, np.int32)])
        rest = replace(rest, tokens=context, max_new_tokens=rest.max_new_tokens - len(segments[-1].tokens))
    stream = join(*segments)
    assert stream.tokens == whole.tokens and rest.max_new_tokens == 0
    assert [segment.finish_reason for segment in segments] == [None] * len(cuts) + ["length"]
    assert_true_logprobs(tiny_model(), request, stream)


@pytest.mark.parametrize("make_engine", INTERRUPTED, indirect=True)
def test_every_logprob_is_that_of_the_version_its_token_names(make_engine, tiny_model):
    """Weights change twice while more run than are finished; some carry three segments."""
    models = {version: tiny_model(seed=seed) for seed, version in enumerate((V0, V1, V2))}
    engine = make_engine(slots=6)
    requests = [Request(i, prompt(3 + i, seed=i), 250 + i, seed=i, temperature=0.8) for i in range(12)]
    parts = [drive(engine, requests, tokens=200)]
    for version in (V1, V2):
        engine.load_weights(version, models[version].weights())
        assert engine.version == version
        parts.append(drive(engine, tokens=200))
    parts.append(drive(engine))
    streams = {request.id: join(*(part[request.id] for part in parts)) for request in requests}
    assert {len(set(stream.versions)) for stream in streams.values()} & {3}
    for request in requests:
        stream = streams[request.id]
        assert len(stream.tokens) == request.max_new_tokens and stream.versions == sorted(stream.versions)
        context, start = [*request.tokens.tolist(), *stream.tokens], len(request.tokens)
        by_version = {version: model.logprobs(context, start, 0.8) for version, model in models.items()}
        expected = torch.stack([by_version[version][i] for i, version in enumerate(stream.versions)])
        torch.testing.assert_close(torch.tensor(stream.logprobs), expected, atol=1e-4, rtol=0)


def test_samples_of_a_group_are_distinct(make_engine):
    requests = [Request(i, prompt(), 30, seed=seed) for i, seed in enumerate([*range(8), -1, 2**63, 2**64 - 2])]
    streams = drive(make_engine(), requests)
    assert len({tuple(streams[request.id].tokens) for request in requests}) == len(requests)


def test_temperature_belongs_to_the_request(make_engine, tiny_model):
    temperatures = [0.0, 0.5, 1.0, 2.0]
    requests = [Request(i, prompt(), 30, seed=1, temperature=t) for i, t in enumerate(temperatures)]
    streams = drive(make_engine(), requests)
    for request in requests:
        assert_true_logprobs(tiny_model(), request, streams[request.id])


def test_greedy_takes_the_likeliest_token(make_engine, tiny_model):
    request = Request(1, prompt(), 40, temperature=0.0)
    stream = drive(make_engine(), [request])[1]
    context = [*request.tokens.tolist(), *stream.tokens]
    assert stream.tokens == tiny_model().logits(context)[len(request.tokens) - 1 : -1].argmax(-1).tolist()


def test_a_stop_token_ends_the_response_and_is_its_last_token(make_engine):
    free = drive(make_engine(), [Request(1, prompt(), 50, temperature=0.0)])[1]
    stop = free.tokens[20]
    end = free.tokens.index(stop) + 1
    never = next(token for token in range(VOCABULARY) if token not in free.tokens)
    request = Request(1, prompt(), 50, temperature=0.0, stop_token_ids=frozenset({stop, never}))
    other = Request(2, prompt(), 50, temperature=0.0, stop_token_ids=frozenset({never}))
    streams = drive(make_engine(), [request, other])
    assert streams[1].tokens == free.tokens[:end] and streams[1].finish_reason == "stop"
    assert streams[2].tokens == free.tokens and streams[2].finish_reason == "length"


def test_stop_tokens_in_the_prompt_and_of_a_slots_former_request_end_nothing(make_engine):
    engine = make_engine(slots=1)
    everything = frozenset(range(VOCABULARY))
    first = drive(engine, [Request(1, prompt(), 10, stop_token_ids=everything)])[1]
    assert len(first.tokens) == 1 and first.finish_reason == "stop"
    assert len(drive(engine, [Request(2, prompt(), 10)])[2].tokens) == 10


def test_a_stop_token_as_the_last_token_of_the_budget_is_a_stop(make_engine):
    free = drive(make_engine(), [Request(1, prompt(), 8, temperature=0.0)])[1]
    end = free.tokens.index(free.tokens[-1]) + 1
    request = Request(1, prompt(), end, temperature=0.0, stop_token_ids=frozenset({free.tokens[-1]}))
    assert drive(make_engine(), [request])[1].finish_reason == "stop"


def test_a_context_may_be_filled_to_the_last_token(make_engine, tiny_model):
    request = Request(1, prompt(20), 44, seed=5)
    stream = drive(make_engine(max_context=64), [request])[1]
    assert len(stream.tokens) == 44
    assert_true_logprobs(tiny_model(), request, stream)


def test_no_token_is_lost_or_handed_over_twice(make_engine, tiny_model):
    engine, rng, handed = make_engine(slots=4), np.random.default_rng(0), 0
    for request in requests_of_many_shapes(40):
        handed += sum(len(stream.tokens) for stream in drive(engine, [request], steps=4).values())
        if rng.random() < 0.3:
            handed += sum(len(chunk.tokens) for chunk in engine.cancel(int(rng.integers(request.id + 1))))
        if rng.random() < 0.1:
            engine.load_weights(Version(0, request.id), tiny_model(seed=request.id % 2).weights())
    handed += sum(len(stream.tokens) for stream in drive(engine).values())
    assert handed == engine.generated_tokens


def test_swapping_in_the_same_weights_changes_no_token(make_engine, tiny_model):
    request = Request(1, prompt(), 400, temperature=0.0)
    whole = drive(make_engine(), [request])[1]
    engine = make_engine()
    before = drive(engine, [request], tokens=25)
    engine.load_weights(V1, tiny_model().weights())
    assert join(before[1], drive(engine)[1]).tokens == whole.tokens


def test_the_engine_keeps_its_own_copy_of_the_weights(make_engine, tiny_model):
    request = Request(1, prompt(), 30, temperature=0.0)
    whole = drive(make_engine(), [request])[1]
    weights = {name: tensor.clone() for name, tensor in tiny_model().weights().items()}
    engine = make_engine(version=None)
    engine.load_weights(V0, weights)
    for tensor in weights.values():
        tensor.fill_(7)
    assert drive(engine, [request])[1].tokens == whole.tokens


BAD_WEIGHTS = {
    "missing": (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
    "extra": (lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}), "unknown"),
    "shape": (lambda w: w.update({"model.norm.weight": torch.zeros(47)}), r"\(47,\).*\(48,\)"),
    "not finite": (lambda w: w.update({"model.norm.weight": torch.full((48,), torch.nan)}), "not finite"),
}


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_bad_weights_are_refused_and_the_old_ones_stay(make_engine, tiny_model, kind):
    spoil, message = BAD_WEIGHTS[kind]
    request = Request(1, prompt(), 30, temperature=0.0)
    whole = drive(make_engine(), [request])[1]
    engine = make_engine()
    before = drive(engine, [request], steps=10)
    weights = tiny_model(seed=1).weights()
    spoil(weights)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(V1, weights)
    stream = join(before[1], drive(engine)[1])
    assert engine.version == V0 and stream.tokens == whole.tokens and set(stream.versions) == {V0}


def test_nothing_is_generated_before_the_first_weights(make_engine, tiny_model):
    engine = make_engine(version=None)
    engine.submit(Request(1, prompt(), 5))
    assert engine.version is None and [engine.step() for _ in range(5)] == [[]] * 5 and engine.live == 1
    engine.load_weights(V0, tiny_model().weights())
    assert len(drive(engine)[1].tokens) == 5


def test_tied_embeddings_come_with_or_without_the_output_projection(make_engine, tiny_model):
    weights = tiny_model().weights()
    weights.pop("lm_head.weight", None)
    engine = make_engine(version=None)
    engine.load_weights(V0, weights)
    engine.load_weights(V1, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert engine.version == V1


def test_frequencies_agree_with_the_distribution_asked_for(make_engine, tiny_model):
    assert_frequencies(make_engine(slots=64), tiny_model(), {"temperature": 0.7}, seeds=1000)


@pytest.mark.parametrize("make_engine", CUTTING, indirect=True)
@pytest.mark.parametrize("options", [{"temperature": 1.5, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8}], ids=str)
def test_frequencies_agree_with_the_cut_distribution_asked_for(make_engine, tiny_model, options):
    assert_frequencies(make_engine(slots=64), tiny_model(), options, seeds=1000)


GOOD = Request(1, prompt(), 5)
BAD_REQUESTS = {
    "over the context": (replace(GOOD, max_new_tokens=60), "max_context"),
    "no budget": (replace(GOOD, max_new_tokens=0), "max_new_tokens"),
    "no tokens": (replace(GOOD, tokens=np.zeros(0, np.int32)), "no tokens"),
    "not integers": (replace(GOOD, tokens=np.ones(3)), "integer"),
    "two dimensions": (replace(GOOD, tokens=np.ones((2, 2), np.int32)), "one-dimensional"),
    "beyond the vocabulary": (replace(GOOD, tokens=np.array([3, VOCABULARY], np.int32)), "vocabulary"),
    "negative token": (replace(GOOD, tokens=np.array([-1], np.int32)), "vocabulary"),
    "negative temperature": (replace(GOOD, temperature=-0.5), "temperature"),
    "temperature is no number": (replace(GOOD, temperature=float("nan")), "temperature"),
    "no mass": (replace(GOOD, top_p=0.0), "top_p"),
    "negative top_k": (replace(GOOD, top_k=-1), "top_k"),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_request_that_can_never_run_is_refused_with_a_sentence(make_engine, kind):
    request, message = BAD_REQUESTS[kind]
    engine = make_engine(max_context=64)
    with pytest.raises(EngineError, match=message):
        engine.submit(request)
    assert engine.live == 0 and len(drive(engine, [GOOD])[1].tokens) == 5


def test_an_id_is_refused_while_it_is_live(make_engine):
    engine, long = make_engine(slots=1), replace(GOOD, max_new_tokens=600)
    drive(engine, [replace(long, id=1), replace(long, id=2)], steps=1)
    for live_id in (1, 2):
        with pytest.raises(EngineError, match="live already"):
            engine.submit(replace(GOOD, id=live_id))
    engine.cancel_all([1, 2])
    assert len(drive(engine, [replace(GOOD, id=1)])[1].tokens) == 5
