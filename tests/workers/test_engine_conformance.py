"""What every generation engine keeps to, whichever it is. A new engine joins by an entry in ENGINES."""

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from april.version import Version
from april.workers.engines.base import Chunk, EngineError, Request
from april.workers.engines.torch_engine import TorchEngine, load_folder_weights

VOCABULARY = 61
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
ENGINES = {"torch": TorchEngine}


@pytest.fixture(params=ENGINES)
def make_engine(request, tiny_model):
    """make_engine(model=qwen3, version=V0, **options) -> an engine that holds the model's weights."""
    made = []

    def make(model=None, version: Version | None = V0, **options):
        model = model or tiny_model()
        engine = ENGINES[request.param](model.folder, **{"slots": 8, "chunk_tokens": 7, "chunk_s": 1e9} | options)
        made.append(engine)
        if version is not None:
            engine.load_weights(version, model.weights())
        return engine

    yield make
    for engine in made:
        engine.close()


class Stream:
    """Everything an engine has handed over of one request."""

    def __init__(self, chunks: list[Chunk]):
        self.chunks = chunks
        self.tokens = [int(token) for chunk in chunks for token in chunk.tokens]
        self.logprobs = [float(logprob) for chunk in chunks for logprob in chunk.logprobs]
        self.versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
        self.finish_reason = chunks[-1].finish_reason if chunks else None


def prompt(length: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def requests_of_many_shapes(count: int = 20, **options) -> list[Request]:
    """Prompts of 1 to 40 tokens, budgets of 1 to 60."""
    rng = np.random.default_rng(7)
    return [
        Request(i, prompt(int(rng.integers(1, 41)), seed=i), int(rng.integers(1, 61)), seed=i, **options)
        for i in range(count)
    ]


def drive(engine, requests=(), steps: int | None = None) -> dict[int, Stream]:
    """Submit, then step until nothing is live or `steps` are done."""
    for request in requests:
        engine.submit(request)
    chunks = defaultdict(list)
    while engine.live and steps != 0:
        for chunk in engine.step():
            chunks[chunk.id].append(chunk)
        steps = None if steps is None else steps - 1
    return defaultdict(lambda: Stream([]), {key: Stream(parts) for key, parts in chunks.items()})


def join(*parts: Stream) -> Stream:
    return Stream([chunk for part in parts for chunk in part.chunks])


def assert_true_logprobs(model, request: Request, stream: Stream) -> None:
    context = [*request.tokens.tolist(), *stream.tokens]
    expected = model.logprobs(context, len(request.tokens), request.temperature or 1.0)
    torch.testing.assert_close(torch.tensor(stream.logprobs), expected, atol=1e-4, rtol=0)


# --- What is handed over ---


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


def test_a_chunk_is_due_after_its_time(make_engine):
    engine = make_engine(chunk_tokens=1000, chunk_s=0.0)
    streams = drive(engine, [Request(1, prompt(), 9)])
    assert [len(chunk.tokens) for chunk in streams[1].chunks] == [1] * 9


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


# --- Log-probabilities ---


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_behaviour_logprobs_are_those_of_a_plain_forward_pass(make_engine, tiny_model, architecture, temperature):
    model = tiny_model(architecture)
    requests = requests_of_many_shapes(12, temperature=temperature)
    streams = drive(make_engine(model), requests)
    for request in requests:
        assert_true_logprobs(model, request, streams[request.id])


def test_long_and_short_sequences_side_by_side_have_true_logprobs(make_engine, tiny_model):
    lengths = [(3, 600), (150, 130), (1, 5), (126, 4), (127, 4), (128, 4), (129, 4), (300, 200), (40, 220), (8, 120)]
    requests = [Request(i, prompt(p, seed=i), r, seed=i) for i, (p, r) in enumerate(lengths)]
    streams = drive(make_engine(slots=4, chunk_tokens=100), requests)
    for request in requests:
        assert_true_logprobs(tiny_model(), request, streams[request.id])


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


# --- The end of a response ---


def test_a_stop_token_ends_the_response_and_is_its_last_token(make_engine):
    free = drive(make_engine(), [Request(1, prompt(), 50, seed=3)])[1]
    stop = free.tokens[20]
    end = free.tokens.index(stop) + 1
    never = next(token for token in range(VOCABULARY) if token not in free.tokens)
    request = Request(1, prompt(), 50, seed=3, stop_token_ids=frozenset({stop, never}))
    other = Request(2, prompt(), 50, seed=3, stop_token_ids=frozenset({never}))
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
    free = drive(make_engine(), [Request(1, prompt(), 8, seed=3)])[1]
    end = free.tokens.index(free.tokens[-1]) + 1
    request = Request(1, prompt(), end, seed=3, stop_token_ids=frozenset({free.tokens[-1]}))
    assert drive(make_engine(), [request])[1].finish_reason == "stop"


def test_a_context_may_be_filled_to_the_last_token(make_engine, tiny_model):
    request = Request(1, prompt(20), 44, seed=5)
    stream = drive(make_engine(max_context=64), [request])[1]
    assert len(stream.tokens) == 44
    assert_true_logprobs(tiny_model(), request, stream)


# --- Interruption ---


@pytest.mark.parametrize("steps", [0, 1, 6, 7, 8, 20])
def test_cancel_hands_over_what_is_left_at_any_step(make_engine, steps):
    request = Request(1, prompt(), 40, seed=2)
    whole = drive(make_engine(), [request])[1]
    engine = make_engine()
    before = drive(engine, [request, replace(request, id=2)], steps)
    stream = join(before[1], Stream(engine.cancel(1)))
    assert stream.tokens == whole.tokens[:steps] and stream.finish_reason is None
    assert engine.cancel(1) == [] and engine.live == 1
    assert join(before[2], drive(engine)[2]).tokens == whole.tokens


def test_a_queued_request_is_cancelled_without_tokens(make_engine):
    engine = make_engine(slots=1)
    drive(engine, [Request(1, prompt(), 40), Request(2, prompt(), 40)], steps=3)
    assert engine.cancel(2) == [] and engine.cancel(99) == [] and engine.live == 1


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [[1], [13], [5, 6, 150]])
def test_a_resumed_run_equals_the_uninterrupted_one(make_engine, tiny_model, temperature, cuts):
    request = Request(1, prompt(), 160, seed=11, temperature=temperature)
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


# --- New weights ---


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
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


def test_swaps_without_a_step_between_them_leave_the_last(make_engine, tiny_model):
    engine = make_engine()
    before = drive(engine, [Request(1, prompt(), 20, seed=4)], steps=3)
    engine.load_weights(V1, tiny_model(seed=1).weights())
    engine.load_weights(V2, tiny_model(seed=2).weights())
    stream = join(before[1], drive(engine)[1])
    assert stream.versions == [V0] * 3 + [V2] * 17


def test_cancel_after_a_swap_returns_one_chunk_a_version(make_engine, tiny_model):
    engine = make_engine(chunk_tokens=1000)
    drive(engine, [Request(1, prompt(), 50), Request(2, prompt(), 50)], steps=4)
    engine.load_weights(V1, tiny_model(seed=1).weights())
    assert [(chunk.version, len(chunk.tokens)) for chunk in engine.cancel(1)] == [(V0, 4)]
    (chunk,) = engine.step()
    assert (chunk.id, chunk.version, len(chunk.tokens)) == (2, V0, 4)
    assert [(chunk.version, len(chunk.tokens)) for chunk in engine.cancel(2)] == [(V1, 1)]


def test_swapping_in_the_same_weights_changes_no_token(make_engine, tiny_model):
    request = Request(1, prompt(), 60, seed=6)
    whole = drive(make_engine(), [request])[1]
    engine = make_engine()
    before = drive(engine, [request], steps=25)
    engine.load_weights(V1, tiny_model().weights())
    assert join(before[1], drive(engine)[1]).tokens == whole.tokens


def test_the_engine_keeps_its_own_copy_of_the_weights(make_engine, tiny_model):
    request = Request(1, prompt(), 30, seed=6)
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
    request = Request(1, prompt(), 30, seed=6)
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
    assert engine.version is None and engine.step() == []
    engine.submit(Request(1, prompt(), 5))
    with pytest.raises(EngineError, match="load_weights"):
        engine.step()
    engine.load_weights(V0, tiny_model().weights())
    assert len(drive(engine)[1].tokens) == 5


@pytest.mark.parametrize("shard_size", ["10KB", "1GB"])
def test_weights_from_a_folder_one_file_or_many(make_engine, tiny_model, tmp_path, shard_size):
    tiny_model().reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    engine = make_engine(version=None)
    engine.load_weights(V0, load_folder_weights(tmp_path))
    request = Request(1, prompt(), 20, seed=6)
    assert drive(engine, [request])[1].tokens == drive(make_engine(), [request])[1].tokens


def test_tied_embeddings_come_with_or_without_the_output_projection(make_engine, tiny_model):
    weights = tiny_model().weights()
    weights.pop("lm_head.weight", None)
    engine = make_engine(version=None)
    engine.load_weights(V0, weights)
    engine.load_weights(V1, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert engine.version == V1


# --- Sampling ---


def assert_agree(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square of counts against probabilities, rare tokens pooled, within four standard deviations."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    if expected[-1] < 1:
        assert observed[-1] <= 5
        observed, expected = observed[:-1], expected[:-1]
    degrees = max(len(expected) - 1, 1)
    assert ((observed - expected) ** 2 / expected).sum() < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8},
     {"temperature": 2.0, "top_k": 12, "top_p": 0.7}, {"top_k": 1}, {"top_p": 1e-9}],
    ids=str,
)  # fmt: skip
def test_frequencies_agree_with_the_distribution_asked_for(make_engine, tiny_model, options):
    """2,000 seeds of one prompt; top-k, then top-p: the fewest likeliest tokens whose mass reaches it."""
    logits = tiny_model().logits(prompt().tolist())[-1].double().numpy() / options.get("temperature", 1.0)
    full = np.exp(logits - logits.max())
    full /= full.sum()
    order = np.argsort(-full)[: options.get("top_k") or None]
    mass = full[order].cumsum() / full[order].sum()
    support = order[: np.searchsorted(mass, options.get("top_p", 1.0)) + 1]
    target = np.zeros(VOCABULARY)
    target[support] = full[support] / full[support].sum()
    requests = [Request(i, prompt(), 1, seed=i, **options) for i in range(2000)]
    streams = drive(make_engine(slots=64), requests)
    tokens = [streams[request.id].tokens[0] for request in requests]
    assert set(tokens) <= set(support.tolist())
    assert_agree(np.bincount(tokens, minlength=VOCABULARY), target)
    for request, token in zip(requests, tokens, strict=True):
        assert abs(streams[request.id].logprobs[0] - np.log(full[token])) < 1e-4


def test_a_sample_draws_afresh_at_every_position(make_engine):
    """At a temperature that flattens everything, tokens are uniform and so are steps from one to the next."""
    requests = [Request(i, prompt(), 600, seed=i, temperature=1e5) for i in range(8)]
    streams = drive(make_engine(), requests)
    tokens = np.array([streams[request.id].tokens for request in requests])
    flat = np.full(VOCABULARY, 1 / VOCABULARY)
    assert_agree(np.bincount(tokens.ravel(), minlength=VOCABULARY), flat)
    for differences in (np.diff(tokens, axis=1), np.diff(tokens, axis=0)):
        assert_agree(np.bincount((differences % VOCABULARY).ravel(), minlength=VOCABULARY), flat)


def test_seeds_give_distinct_samples_and_the_same_seed_the_same(make_engine):
    requests = [Request(i, prompt(), 30, seed=seed) for i, seed in enumerate([*range(8), 0, -1, 2**63, 2**64 - 2])]
    streams = drive(make_engine(), requests)
    assert streams[8].tokens == streams[0].tokens
    others = {tuple(streams[request.id].tokens) for request in requests}
    assert len(others) == len(requests) - 1


def test_a_sample_does_not_depend_on_what_runs_beside_it(make_engine):
    requests = requests_of_many_shapes(16, temperature=0.9)
    requests[3] = replace(requests[3], top_k=5)
    requests[5] = replace(requests[5], temperature=0.0)
    requests[6] = replace(requests[6], top_p=0.5)
    together = drive(make_engine(slots=8), requests)
    reversed_order = drive(make_engine(slots=3), requests[::-1])
    for request in requests:
        alone = drive(make_engine(slots=1), [request])[request.id]
        assert alone.tokens == together[request.id].tokens == reversed_order[request.id].tokens


# --- Refusals ---

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
    engine = make_engine(slots=1)
    drive(engine, [replace(GOOD, id=1), replace(GOOD, id=2)], steps=1)
    for live_id in (1, 2):
        with pytest.raises(EngineError, match="live already"):
            engine.submit(replace(GOOD, id=live_id))
    drive(engine)
    assert len(drive(engine, [replace(GOOD, id=1)])[1].tokens) == 5


# --- The torch engine alone ---


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "gpt2"}, "llama, qwen2, qwen3"), ({"hidden_act": "gelu"}, "gelu"),
     ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
     ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic")],
)  # fmt: skip
def test_a_model_that_it_cannot_run_is_refused_with_a_sentence(tiny_model, tmp_path, change, message):
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
