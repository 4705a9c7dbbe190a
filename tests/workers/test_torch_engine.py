"""The embedded engine: what it does in which step, and that a sample depends only on its seed and the weights."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from april.simulate.probe import load_folder_weights
from april.wire.message import Version
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import (
    V0,
    V1,
    V2,
    VOCABULARY,
    Stream,
    assert_agree,
    assert_true_logprobs,
    drive,
    join,
    prompt,
    requests_of_many_shapes,
)
from april.workers.engines.embedded.decoder import Decoder
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.embedded.flat_cache import SCRATCH, Extents, FlatCache
from april.workers.engines.embedded.sampling import LARGE_VOCABULARY, draw
from tests.support.marks import full


@pytest.fixture(params=[False, True], ids=["grouped", "flat"])
def make_engine(request, tiny_model):
    """make_engine(model=qwen3, version=V0, **options) -> engine with the model's weights and either kind of cache."""
    made = []

    def make(model=None, version: Version | None = V0, **options):
        model = model or tiny_model()
        defaults = {"slots": 8, "chunk_tokens": 7, "report_s": 1e9, "flat": request.param}
        engine = TorchEngine(model.folder, **defaults | options)
        made.append(engine)
        if version is not None:
            engine.load_weights(version, model.weights())
        return engine

    yield make
    for engine in made:
        engine.close()


only_flat = pytest.mark.parametrize("make_engine", [True], ids=["flat"], indirect=True)


def test_a_chunk_is_due_after_its_time(make_engine):
    engine = make_engine(chunk_tokens=1000, report_s=0.0)
    streams = drive(engine, [Request(1, prompt(), 9)])
    assert [len(chunk.tokens) for chunk in streams[1].chunks] == [1] * 9


@pytest.mark.full
def test_a_sample_draws_afresh_at_every_position(make_engine):
    """At a very high temperature, tokens are uniform, and so are differences between neighbours."""
    requests = [Request(i, prompt(), 600, seed=i, temperature=1e5) for i in range(8)]
    streams = drive(make_engine(), requests)
    tokens = np.array([streams[request.id].tokens for request in requests])
    flat = np.full(VOCABULARY, 1 / VOCABULARY)
    assert_agree(np.bincount(tokens.ravel(), minlength=VOCABULARY), flat)
    for differences in (np.diff(tokens, axis=1), np.diff(tokens, axis=0)):
        assert_agree(np.bincount((differences % VOCABULARY).ravel(), minlength=VOCABULARY), flat)


@pytest.mark.parametrize("cuts", [[1], [5, 6, 150]])
def test_a_resumed_run_equals_the_uninterrupted_one(make_engine, tiny_model, cuts):
    request = Request(1, prompt(), 160, seed=11)
    whole = drive(make_engine(), [request])[1]
    segments, rest = [], request
    for steps in [*np.diff([0, *cuts]).tolist(), None]:
        engine = make_engine()
        before = drive(engine, [rest], steps)[1]
        segments.append(join(before, Stream(engine.cancel(1))))
        tokens = np.concatenate([rest.tokens, np.array(segments[-1].tokens, np.int32)])
        rest = replace(rest, tokens=tokens, max_new_tokens=rest.max_new_tokens - len(segments[-1].tokens))
    stream = join(*segments)
    assert stream.tokens == whole.tokens and rest.max_new_tokens == 0
    assert [segment.finish_reason for segment in segments] == [None] * len(cuts) + ["length"]
    assert_true_logprobs(tiny_model(), request, stream)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", full("llama")])
def test_after_a_swap_every_logprob_is_that_of_the_new_weights(make_engine, tiny_model, architecture):
    old, new = tiny_model(architecture, 0), tiny_model(architecture, 1)
    engine = make_engine(old, slots=6)
    requests = [replace(r, max_new_tokens=r.max_new_tokens + 20) for r in requests_of_many_shapes(14, temperature=0.8)]
    before = drive(engine, requests, steps=10)
    engine.load_weights(V1, new.weights())
    assert engine.version == V1
    streams = {key: join(before[key], rest) for key, rest in drive(engine).items()}
    assert {V0, V1} == {version for stream in streams.values() for version in stream.versions}
    for request in requests:
        stream, context = streams[request.id], [*request.tokens.tolist(), *streams[request.id].tokens]
        old_tokens = stream.versions.count(V0)
        assert old_tokens == (10 if request.id < 6 else 0)
        assert stream.versions == sorted(stream.versions)
        start = len(request.tokens)
        expected = old.logprobs(context, start, 0.8)
        expected[old_tokens:] = new.logprobs(context, start, 0.8)[old_tokens:]
        torch.testing.assert_close(torch.tensor(stream.logprobs), expected, atol=1e-4, rtol=0)
        assert len(stream.tokens) == request.max_new_tokens


@pytest.fixture
def computed(monkeypatch):
    """Contexts that engines have prefilled, each as a list of tokens, with its padding in a cache by groups."""
    contexts, by_groups, flat = [], Decoder.prefill, Decoder.fill

    def prefill(self, tokens, *behind):
        contexts.extend(tokens.tolist())
        return by_groups(self, tokens, *behind)

    def fill(self, tokens, positions, rows):
        contexts.extend(part.tolist() for part in tokens.tensor_split(rows.query_starts[1:-1].long()))
        return flat(self, tokens, positions, rows)

    monkeypatch.setattr(Decoder, "prefill", prefill)
    monkeypatch.setattr(Decoder, "fill", fill)
    return contexts


@pytest.mark.parametrize("keep", [False, True])
def test_a_group_s_prompt_is_prefilled_once_whenever_its_samples_arrive(make_engine, tiny_model, computed, keep):
    """Whether submitted together or while others run under the same weights; other prompts are prefilled separately."""
    group = [Request(i, prompt(40), 30 + i, seed=i) for i in range(6)]
    alone = {request.id: drive(make_engine(), [request])[request.id] for request in group}
    computed.clear()
    engine, context, other = make_engine(keep_cache=keep), prompt(40)[:-1].tolist(), prompt(40, seed=1)
    before = drive(engine, [*group[:4], Request(9, other, 60)], steps=12)
    assert sorted(computed) == sorted([context, other[:-1].tolist()])
    computed.clear()
    after = drive(engine, group[4:])
    assert computed == ([context] if keep else []), "a cache that is kept may be one of older weights"
    for request in group:
        stream = join(before[request.id], after[request.id]) if request.id < 4 else after[request.id]
        assert stream.tokens == alone[request.id].tokens
        assert_true_logprobs(tiny_model(), request, stream)


def test_under_new_weights_shared_prefixes_are_prefilled_once_again(make_engine, tiny_model, computed):
    """Two groups behind one template. Groups of lengths are left, and every log-probability is that of its weights."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    template, questions = prompt(100), [prompt(70, seed=8), prompt(90, seed=9)]
    requests = [
        Request(i, np.concatenate([template, questions[i % 2]]), 60 + 9 * i, seed=i, temperature=0.8) for i in range(8)
    ]
    engine = make_engine(old)
    before = drive(engine, requests, steps=50)
    computed.clear()
    engine.load_weights(V1, new.weights())
    next_step = drive(engine, steps=1)
    contexts = sum(len(request.tokens) + 50 for request in requests)
    assert sum(map(len, computed)) < 0.55 * contexts
    streams = {key: join(before[key], next_step[key], rest) for key, rest in drive(engine).items()}
    for request in requests:
        stream, start = streams[request.id], len(request.tokens)
        assert stream.versions.count(V0) == 50 and len(stream.tokens) == request.max_new_tokens
        context = [*request.tokens.tolist(), *stream.tokens]
        expected = old.logprobs(context, start, 0.8)
        expected[50:] = new.logprobs(context, start, 0.8)[50:]
        torch.testing.assert_close(torch.tensor(stream.logprobs), expected, atol=1e-4, rtol=0)


def test_swaps_without_a_step_between_them_leave_the_last(make_engine, tiny_model):
    engine = make_engine()
    before = drive(engine, [Request(1, prompt(), 20, seed=4)], steps=3)
    engine.load_weights(V1, tiny_model(seed=1).weights())
    engine.load_weights(V2, tiny_model(seed=2).weights())
    stream = join(before[1], drive(engine)[1])
    assert stream.versions == [V0] * 3 + [V2] * 17


def test_a_kept_cache_is_that_of_the_old_weights(make_engine, tiny_model):
    """The token after the swap is sampled by the new weights from the cache of the old ones."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    request, streams = Request(1, prompt(), 40, seed=4), {}
    for keep in (True, False):
        engine = make_engine(old, keep_cache=keep)
        before = drive(engine, [request], steps=9)[1]
        engine.load_weights(V1, new.weights())
        streams[keep] = join(before, drive(engine)[1])
        assert streams[keep].versions == [V0] * 9 + [V1] * 31
    kept = torch.tensor(streams[True].logprobs)
    context = [*request.tokens.tolist(), *streams[True].tokens]
    expected = new.logprobs(context, len(request.tokens))
    assert streams[True].tokens[:9] == streams[False].tokens[:9]
    assert (kept[9:] - expected[9:]).abs().max() > 1e-2
    assert_true_logprobs(old, request, before)


def test_cancel_after_a_swap_returns_one_chunk_a_version(make_engine, tiny_model):
    engine = make_engine(chunk_tokens=1000)
    drive(engine, [Request(1, prompt(), 50), Request(2, prompt(), 50)], steps=4)
    engine.load_weights(V1, tiny_model(seed=1).weights())
    assert [(chunk.version, len(chunk.tokens)) for chunk in engine.cancel(1)] == [(V0, 4)]
    (chunk,) = engine.step()
    assert (chunk.id, chunk.version, len(chunk.tokens)) == (2, V0, 4)
    assert [(chunk.version, len(chunk.tokens)) for chunk in engine.cancel(2)] == [(V1, 1)]


@pytest.mark.parametrize("shard_size", ["10KB", full("1GB")])
def test_folder_weights_are_loaded_from_one_or_several_files(make_engine, tiny_model, tmp_path, shard_size):
    tiny_model().reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    engine = make_engine(version=None)
    engine.load_weights(V0, load_folder_weights(tmp_path))
    request = Request(1, prompt(), 20, seed=6)
    assert drive(engine, [request])[1].tokens == drive(make_engine(), [request])[1].tokens


def test_seeds_give_distinct_samples_and_the_same_seed_the_same(make_engine):
    requests = [Request(i, prompt(), 30, seed=seed) for i, seed in enumerate([*range(8), 0, -1, 2**63, 2**64 - 2])]
    streams = drive(make_engine(), requests)
    assert streams[8].tokens == streams[0].tokens
    others = {tuple(streams[request.id].tokens) for request in requests}
    assert len(others) == len(requests) - 1


@pytest.mark.parametrize("vocabulary", [40, LARGE_VOCABULARY, LARGE_VOCABULARY + 77, full(30_000)])
def test_a_token_is_drawn_by_its_share_of_the_weights(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.randn(64, vocabulary, generator=generator).mul(3).softmax(-1)
    weights[torch.rand(64, vocabulary, generator=generator) < 0.5] = 0
    uniform = torch.rand(64, 1, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    drawn, sums = draw(weights, uniform), weights.double().cumsum(-1)
    assert (weights.gather(1, drawn) > 0).all()
    target, end = uniform * sums[:, -1:], sums.gather(1, drawn)
    assert (end >= target - 1e-12).all() and (end - weights.gather(1, drawn) <= target + 1e-12).all()


@only_flat
def test_steps_that_run_ahead_of_the_host_lose_and_repeat_nothing(make_engine):
    stops = frozenset(range(0, VOCABULARY, 9))
    requests = [Request(i, prompt(3 + i % 4), 40, seed=i, stop_token_ids=stops) for i in range(24)]
    plain, ahead = make_engine(slots=4), make_engine(slots=4)
    plain._flat = False  # its cache is flat; its steps wait for the host
    expected = drive(plain, requests)
    for request in requests:
        ahead.submit(request)
    chunks, ran_ahead = [], 0
    while ahead.live:
        chunks += ahead.step()
        ran_ahead += ahead._ahead is not None
    tokens = {i: np.concatenate([c.tokens for c in chunks if c.id == i]).tolist() for i in range(24)}
    assert tokens == {i: list(stream.tokens) for i, stream in expected.items()} and ran_ahead > 10
    assert ahead.generated_tokens == plain.generated_tokens == sum(map(len, tokens.values()))


def test_a_sample_does_not_depend_on_what_runs_beside_it(make_engine):
    requests = requests_of_many_shapes(9, temperature=0.9)
    requests[3] = replace(requests[3], top_k=5)
    requests[5] = replace(requests[5], temperature=0.0)
    requests[6] = replace(requests[6], top_p=0.5)
    together = drive(make_engine(slots=5), requests)
    reversed_order = drive(make_engine(slots=3), requests[::-1])
    for request in requests:
        alone = drive(make_engine(slots=1), [request])[request.id]
        assert alone.tokens == together[request.id].tokens == reversed_order[request.id].tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "gpt2"}, "llama, qwen2, qwen3"), ({"hidden_act": "gelu"}, "gelu"),
     ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
     ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic")],
)  # fmt: skip
def test_an_unsupported_model_is_refused(tiny_model, tmp_path, change, message):
    config = json.loads((tiny_model().folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=message):
        TorchEngine(tmp_path)


def test_more_context_than_the_model_has_positions_is_refused(tiny_model, tmp_path):
    with pytest.raises(EngineError, match="640"):
        TorchEngine(tiny_model().folder, max_context=641)
    with pytest.raises(EngineError, match="does not exist"):
        TorchEngine(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="safetensors"):
        load_folder_weights(tmp_path)


def test_contexts_larger_than_one_prefill_are_admitted_one_after_another(tiny_model):
    engine = TorchEngine(tiny_model().folder, slots=8, prefill_tokens=50)
    engine.load_weights(V0, tiny_model().weights())
    requests = [Request(i, prompt(length, seed=i), 20, seed=i) for i, length in enumerate([200, 30, 30, 10, 49, 51, 3])]
    streams = drive(engine, requests)
    engine.load_weights(V1, tiny_model().weights())
    for request in requests:
        assert_true_logprobs(tiny_model(), request, streams[request.id])


@pytest.mark.full
@pytest.mark.parametrize("contexts_held", [1, 2, 3.5])
def test_sequences_that_find_no_room_in_the_cache_wait_and_lose_nothing(
    tiny_model, make_engine, monkeypatch, contexts_held
):
    """Each token is the one of an engine with room for all; the youngest is evicted first, so that all end."""
    requests = [Request(i, prompt(60, seed=i), 330 + 40 * (i % 3), seed=i) for i in range(6)]
    whole = drive(make_engine(), requests)
    evicted, evict = [], TorchEngine._evict
    monkeypatch.setattr(FlatCache, "_room", lambda cache: SCRATCH + int(contexts_held * cache.max_context))
    monkeypatch.setattr(TorchEngine, "_evict", lambda engine, stored: (evicted.append(1), evict(engine, stored)))
    engine = make_engine(flat=True)
    before = drive(engine, requests, steps=100)
    engine.load_weights(V1, tiny_model().weights())
    after = drive(engine)
    assert evicted
    for request in requests:
        streams = [part[request.id] for part in (before, after) if request.id in part]
        assert join(*streams).tokens == whole[request.id].tokens


@only_flat
def test_contexts_that_are_moved_together_between_two_steps_of_a_batch_go_on_as_before(make_engine):
    """As for a request that comes then, and still finds no room."""
    requests = [Request(i, prompt(60, seed=i), length, seed=i) for i, length in enumerate([20, 60, 60])]
    whole, engine = drive(make_engine(), requests), make_engine(chunk_tokens=100)
    before = drive(engine, requests, steps=30)
    with torch.inference_mode():
        assert engine._batch is not None and engine._cache._compact()
    after = drive(engine)
    for request in requests:
        streams = [part[request.id] for part in (before, after) if request.id in part]
        assert join(*streams).tokens == whole[request.id].tokens


@only_flat
def test_an_abort_of_those_that_waited_for_room_in_the_cache_lets_others_in(make_engine, monkeypatch):
    monkeypatch.setattr(FlatCache, "_room", lambda cache: SCRATCH + cache.max_context)
    engine = make_engine()
    drive(engine, [Request(i, prompt(60, seed=i), 400, seed=i) for i in range(4)], steps=100)
    assert engine._cache_full
    engine.cancel_all(list(range(4)))
    assert drive(engine, [Request(9, prompt(10), 5, seed=9)])[9].tokens


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_extents_never_overlap_and_free_ranges_are_merged(steps):
    extents, held = Extents(100), {}
    for key, length in steps:
        if key in held:
            extents.give(*held.pop(key))
        elif (start := extents.take(length)) is not None:
            held[key] = (start, length)
        taken = sorted(held.values())
        assert all(start + length <= after for (start, length), (after, _) in pairwise(taken))
        assert not taken or sum(taken[-1]) <= 100
    for start, length in held.values():
        extents.give(start, length)
    assert extents.take(100) == 0


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("temperature", [full(0.0), 0.6, full(1.0), full(1.7)])
def test_logprobs_of_other_architectures_are_true(make_engine, tiny_model, architecture, temperature):
    model = tiny_model(architecture)
    requests = requests_of_many_shapes(12, temperature=temperature)
    streams = drive(make_engine(model), requests)
    for request in requests:
        assert_true_logprobs(model, request, streams[request.id])


def poison(engine: TorchEngine, token: int) -> None:
    """From now on, contexts that contain the token have no finite logits."""
    with torch.inference_mode():
        engine._decoder.embedding[token] = torch.nan


def test_a_sequence_without_finite_logits_fails_alone(make_engine, tiny_model):
    """It also leaves nothing in the cache for later sequences."""
    requests = [Request(i, prompt(seed=i), 20, seed=i) for i in range(3)]
    whole = drive(make_engine(tiny_model("qwen2")), requests)
    met = {token for request in requests for token in [*request.tokens.tolist(), *whole[request.id].tokens]}
    unmet = min(set(range(VOCABULARY)) - met)
    engine = make_engine(tiny_model("qwen2"))
    poison(engine, unmet)
    for request in [Request(9, np.full(30, unmet, np.int32), 20), *requests]:
        engine.submit(request)
    assert engine.step() == [] and engine.live == 3
    ((failed, why),) = engine.failures()
    assert failed == 9 and why == "weights 0.0 give logits that are not finite"
    for went_on in (drive(engine), drive(engine, requests)):
        assert {key: stream.tokens for key, stream in went_on.items()} == {r.id: whole[r.id].tokens for r in requests}


def test_a_sequence_that_fails_midway_returns_its_tokens(make_engine, tiny_model):
    """A single sequence without finite logits does not show that the weights are bad."""
    request = Request(1, prompt(), 20, seed=1)
    tokens = drive(make_engine(tiny_model("qwen2")), [request])[1].tokens
    fatal = max(set(tokens[:-1]) - set(request.tokens.tolist()), key=tokens.index)
    engine = make_engine(tiny_model("qwen2"), chunk_tokens=1000)
    poison(engine, fatal)
    engine.submit(request)
    (chunk,) = [chunk for _ in range(20) for chunk in engine.step()]
    assert chunk.tokens.tolist() == tokens[: tokens.index(fatal) + 1] and chunk.finish_reason is None
    assert [key for key, _ in engine.failures()] == [1] and engine.live == 0


def test_weights_without_any_finite_logits_end_the_engine(make_engine, tiny_model):
    engine = make_engine(tiny_model("qwen2"))
    poison(engine, 7)
    for key in (1, 2):
        engine.submit(Request(key, np.array([7], np.int32), 20))
    with pytest.raises(EngineError, match="load others"):
        engine.step()
