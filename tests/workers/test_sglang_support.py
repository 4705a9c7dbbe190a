"""Drawn from a part of the distribution on the real server: each token's support is what the request's cut leaves, and
its log-probability that of a plain forward pass renormalised over it, under the version that the token names."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from april.data.support import Support
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, V1, Stream, assert_true_logprobs, drive, join, prompt
from april.workers.engines.embedded.engine import TorchEngine

pytestmark = [pytest.mark.timeout(900), pytest.mark.sglang]
"""the first test on SGLang starts its server"""

CUTS = {
    "top_k": {"top_k": 6}, "top_p": {"top_k": 50, "top_p": 0.8}, "min_p": {"top_k": 50, "min_p": 0.1},
    "all of them": {"top_k": 12, "top_p": 0.9, "min_p": 0.02}, "nothing cut off": {"top_k": 1000},
}  # fmt: skip
NEAR = 1e-5
"""Probabilities closer than this may be in either order."""


@pytest.fixture
def make_engine(attach_engine, tiny_model):
    def make(**options):
        engine = attach_engine(**{"slots": 64, "chunk_tokens": 7} | options)
        engine.load_weights(V0, tiny_model().weights())
        return engine

    return make


def cut_requests(count, tokens, **cut):
    options = {"temperature": 1.3, "with_support": True} | cut
    return [Request(i, prompt(3 + i, seed=i), tokens, seed=i, **options) for i in range(count)]


def supports(stream: Stream) -> list[list[int]]:
    for chunk in stream.chunks:
        assert isinstance(chunk.support, Support) and chunk.support.holds(chunk.tokens)
    rows = [np.split(chunk.support.ids, chunk.support.counts.cumsum()[:-1]) for chunk in stream.chunks]
    return [row.tolist() for of_chunk in rows for row in of_chunk]


def assert_true_supports(models, request: Request, stream: Stream) -> None:
    """`models`: by version. SGLang applies each bound to the whole distribution, min_p to the likeliest token."""
    context, start = [*request.tokens.tolist(), *stream.tokens], len(request.tokens)
    logits = {version: model.logits(context)[start - 1 : -1].double() for version, model in models.items()}
    rows = zip(stream.tokens, stream.logprobs, stream.versions, supports(stream), strict=True)
    for place, (token, logprob, version, support) in enumerate(rows):
        scaled = logits[version][place] / request.temperature
        assert abs(torch.log_softmax(scaled[support], -1)[support.index(token)].item() - logprob) < 1e-4
        ordered, order = scaled.softmax(-1).sort(descending=True)
        before = ordered.cumsum(0) - ordered
        least = max(request.min_p * ordered[0], ordered[: request.top_k][-1])
        surely = order[(before < request.top_p - NEAR) & (ordered > least + NEAR)]
        perhaps = order[(before < request.top_p + NEAR) & (ordered > least - NEAR)]
        assert set(surely.tolist()) <= set(support) <= set(perhaps.tolist()) and len(set(support)) == len(support)


@pytest.mark.parametrize("cut", CUTS)
def test_each_token_comes_with_its_support(make_engine, tiny_model, cut):
    """Requests without supports, as for evaluation, run at the same time."""
    requests = cut_requests(6, 40, **CUTS[cut])
    others = [replace(one, id=10 + one.id, with_support=False, top_k=0, min_p=0.0) for one in requests[:3]]
    streams = drive(make_engine(), [*requests, *others])
    for request in requests:
        assert len(streams[request.id].tokens) == 40
        assert_true_supports({V0: tiny_model()}, request, streams[request.id])
    for request in others:
        assert_true_logprobs(tiny_model(), request, streams[request.id])
        assert all(chunk.support is None for chunk in streams[request.id].chunks)


def test_supports_follow_their_tokens_over_cancels_resumes_and_weight_updates(make_engine, tiny_model):
    engine, models = make_engine(), {V0: tiny_model(), V1: tiny_model(seed=1)}
    requests = cut_requests(6, 300, **CUTS["all of them"])
    parts = {request.id: [] for request in requests}
    for request, stream in drive(engine, requests, tokens=150).items():
        parts[request].append(stream)
    cancelled = engine.cancel_all(range(3))
    for request in requests[:3]:
        parts[request.id].append(Stream([chunk for chunk in cancelled if chunk.id == request.id]))
        tokens = join(*parts[request.id]).tokens
        context = np.concatenate([request.tokens, np.array(tokens, np.int32)])
        engine.submit(replace(request, tokens=context, max_new_tokens=300 - len(tokens)))
    engine.load_weights(V1, models[V1].weights())
    for request, stream in drive(engine).items():
        parts[request].append(stream)
    for request in requests:
        stream = join(*parts[request.id])
        assert len(stream.tokens) == 300 and set(stream.versions) == {V0, V1}
        assert_true_supports(models, request, stream)


def test_the_embedded_engine_refuses_requests_for_supports(tiny_model):
    engine = TorchEngine(tiny_model().folder)
    for cut in ({"top_k": 5, "with_support": True}, {"min_p": 0.1}):
        with pytest.raises(EngineError, match="'sglang'"):
            engine.submit(Request(1, prompt(), 5, **cut))
    engine.close()
