"""Tokens are drawn from the model's distribution as the request asks, and their log-probabilities are the model's."""

import numpy as np
import torch

from april.workers.engines.base import Request
from april.workers.engines.conformance.checks import Bench, check, refusal
from april.workers.engines.conformance.driving import (
    V0,
    V1,
    V2,
    assert_frequencies,
    drive,
    join,
    prompt,
    requests_of_many_shapes,
)

CUTS = ({"temperature": 1.5, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8})


@check(of_true_distribution=True)
def long_and_short_sequences_side_by_side_have_true_logprobs(bench: Bench):
    lengths = [(3, 600), (150, 130), (1, 5), (126, 4), (127, 4), (128, 4), (129, 4), (300, 200), (40, 220), (8, 120)]
    requests = [Request(i, prompt(p, seed=i), r, seed=i) for i, (p, r) in enumerate(lengths)]
    streams = drive(bench.make_engine(slots=4, chunk_tokens=100), requests)
    for request in requests:
        bench.assert_true_logprobs(request, streams[request.id])


@check(of_true_distribution=True, cases={f"at temperature {t:g}": {"temperature": t} for t in (0.0, 0.6, 1.0, 1.7)})
def behaviour_logprobs_are_those_of_a_plain_forward_pass(bench: Bench, temperature: float):
    requests = requests_of_many_shapes(12, temperature=temperature)
    streams = drive(bench.make_engine(), requests)
    for request in requests:
        bench.assert_true_logprobs(request, streams[request.id])


@check(of_true_distribution=True, interrupts=True)
def every_logprob_is_that_of_the_version_its_token_names(bench: Bench):
    """Weights change twice while most requests run; some have three segments.

    Responses are long, because a server on the same cores runs ahead of the engine that reads it.
    """
    models = {version: bench.models(seed=seed) for seed, version in enumerate((V0, V1, V2))}
    engine = bench.make_engine(slots=6)
    requests = [Request(i, prompt(3 + i, seed=i), 500 + i, seed=i, temperature=0.8) for i in range(12)]
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


@check(of_true_distribution=True)
def samples_of_a_group_are_distinct(bench: Bench):
    requests = [Request(i, prompt(), 30, seed=seed) for i, seed in enumerate([*range(8), -1, 2**63, 2**64 - 2])]
    streams = drive(bench.make_engine(), requests)
    assert len({tuple(streams[request.id].tokens) for request in requests}) == len(requests)


@check(of_true_distribution=True)
def temperature_belongs_to_the_request(bench: Bench):
    temperatures = [0.0, 0.5, 1.0, 2.0]
    requests = [Request(i, prompt(), 30, seed=1, temperature=t) for i, t in enumerate(temperatures)]
    streams = drive(bench.make_engine(), requests)
    for request in requests:
        bench.assert_true_logprobs(request, streams[request.id])


@check(of_true_distribution=True)
def greedy_takes_the_likeliest_token(bench: Bench):
    request = Request(1, prompt(), 40, temperature=0.0)
    stream = drive(bench.make_engine(), [request])[1]
    context = [*request.tokens.tolist(), *stream.tokens]
    assert stream.tokens == bench.models().logits(context)[len(request.tokens) - 1 : -1].argmax(-1).tolist()


@check(of_true_distribution=True)
def frequencies_agree_with_the_distribution_asked_for(bench: Bench):
    assert_frequencies(bench.make_engine(slots=64), bench.models(), {"temperature": 0.7}, seeds=1000)


@check(of_true_distribution=True, cases={str(options): {"options": options} for options in CUTS})
def frequencies_agree_with_the_cut_distribution_asked_for(bench: Bench, options: dict):
    """An engine without `truncates_sampling` refuses such a request."""
    engine = bench.make_engine(slots=64)
    if bench.entry.truncates_sampling:
        assert_frequencies(engine, bench.models(), options, seeds=1000)
    else:
        assert refusal(lambda: engine.submit(Request(1, prompt(), 5, **options)))


@check()
def supports_come_with_their_tokens_or_are_refused(bench: Bench):
    engine, request = bench.make_engine(), Request(1, prompt(), 30, seed=3, top_k=6, with_support=True)
    if not bench.entry.returns_supports:
        assert refusal(lambda: engine.submit(request)) and engine.live == 0
        return
    for chunk in drive(engine, [request])[1].chunks:
        assert chunk.support and chunk.support.holds(chunk.tokens) and np.max(chunk.support.counts) <= 6
