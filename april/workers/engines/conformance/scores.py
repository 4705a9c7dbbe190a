"""Checks of the log-probabilities of texts that an engine scores, which reveal wrong weights, and of sampled tokens."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from april.weights.canary import Canary, canary_tokens
from april.weights.source import StagedWeights
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import (
    V0,
    V1,
    V2,
    VOCABULARY,
    Bench,
    a_matrix,
    assert_frequencies,
    check,
    drive,
    join,
    prompt,
    refusal,
    requests_of_many_shapes,
)
from april.workers.engines.weight_loading import WeightCheck

# --- faults in weight transfer ----------------------------------------------------------------------------------------

Weights = dict[str, torch.Tensor]
STEP_CHANGE = 1e-3
"""Change of each weight in one training step: with AdamW it is about the learning rate, here 1e-3."""


def a_step_further(weights: Weights, seed: int = 0) -> Weights:
    """Weights of the next version, one training step later: each value changed by STEP_CHANGE, with a random sign by
    `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + STEP_CHANGE * torch.randn(tensor.shape, generator=generator).sign().to(tensor.dtype)
        for name, tensor in weights.items()
    }


def all_of_the_version_before(old: Weights, new: Weights) -> Weights:
    return old


def one_of_the_version_before(old: Weights, new: Weights) -> Weights:
    return new | {(name := a_matrix(new)): old[name]}


def one_transposed(old: Weights, new: Weights) -> Weights:
    name = a_matrix(new)
    return new | {name: new[name].t().contiguous().view(new[name].shape)}


def two_layers_swapped(old: Weights, new: Weights) -> Weights:
    def other(name: str) -> str:
        first, second = "model.layers.0.", "model.layers.1."
        return name.replace(first, second) if first in name else name.replace(second, first)

    return {name: new[other(name)] for name in new}


def rounded_to_8_bits(old: Weights, new: Weights) -> Weights:
    return {name: tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for name, tensor in new.items()}


def one_ranks_shard_of_the_version_before(old: Weights, new: Weights) -> Weights:
    """Fault in the published weights: one of two FSDP2 ranks, which holds the first half of each tensor's rows, sent
    them from the previous version (`old`). Returns what the engine gets."""
    return {name: torch.cat([old[name][: -(-len(t) // 2)], t[-(-len(t) // 2) :]]) for name, t in new.items()}


FAULTS: Mapping[str, Callable[[Weights, Weights], Weights]] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        all_of_the_version_before,
        one_of_the_version_before,
        one_transposed,
        two_layers_swapped,
        rounded_to_8_bits,
        one_ranks_shard_of_the_version_before,
    )
}
"""Faults by name: fault(weights of the previous version, published weights) -> weights that the engine gets."""


# --- scores -----------------------------------------------------------------------------------------------------------

CANARY_TEXT = canary_tokens(VOCABULARY)


@check()
def scores_are_those_of_a_plain_forward_pass_or_are_refused(bench: Bench):
    engine = bench.make_engine()
    if not bench.entry.scores:
        assert refusal(lambda: engine.score(CANARY_TEXT))
        return
    scores = engine.score(CANARY_TEXT)
    assert scores.dtype == np.float32 and engine.dtype == "float32"
    torch.testing.assert_close(
        torch.tensor(scores), bench.models().logprobs(CANARY_TEXT.tolist(), 1), atol=1e-4, rtol=0
    )


@check(interrupts=True)
def a_score_changes_nothing_of_what_runs(bench: Bench):
    if not bench.entry.scores:
        return
    request = Request(1, prompt(), 300, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    engine = bench.make_engine()
    before = drive(engine, [request], tokens=50)
    engine.score(CANARY_TEXT)
    assert join(before[1], drive(engine)[1]).tokens == whole.tokens


@check(interrupts=True)
def disowned_weights_give_no_token_and_others_go_on(bench: Bench):
    engine = bench.make_engine()
    request = Request(1, prompt(), 40, temperature=0.0)
    engine.discard_weights()
    engine.submit(request)
    assert engine.version is None and [engine.step() for _ in range(5)] == [[]] * 5 and engine.live == 1
    engine.load_weights(V1, bench.models(seed=1).weights())
    stream = drive(engine)[1]
    assert len(stream.tokens) == 40 and set(stream.versions) == {V1}


@check(of_true_distribution=True, cases={name: {"fault": fault} for name, fault in FAULTS.items()})
def other_weights_than_those_published_are_found(bench: Bench, fault: Callable[[Weights, Weights], Weights]):
    if not bench.entry.scores:
        return
    model = bench.models()
    old = {name: tensor.clone() for name, tensor in model.weights().items() if name != "lm_head.weight"}
    new = a_step_further(old)
    engine, weight_check = bench.make_engine(version=None), WeightCheck()

    def load(version: Version, sent: Weights, published: Weights) -> None:
        engine.load_weights(version, sent)
        canary = Canary(CANARY_TEXT.tolist(), model.logprobs_under(published, CANARY_TEXT.tolist()).tolist(), "float32")
        staged = StagedWeights(version, None, 0.0, canary=canary, digest=str(version.step))
        weight_check.judge(staged, canary, engine.score(CANARY_TEXT), engine.dtype)

    load(V0, old, old)
    assert f"version {V1}" in refusal(lambda: load(V1, fault(old, new), new))
    load(V1, new, new)
    assert weight_check.failures == 0


# --- samples ----------------------------------------------------------------------------------------------------------

CUT_OPTIONS = ({"temperature": 1.5, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8})


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
    """Checks that each token's log-probability is that of the version which the engine reports with it. Weights change
    twice while most requests run, so some responses have tokens of three versions.

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


@check(of_true_distribution=True, cases={str(options): {"options": options} for options in CUT_OPTIONS})
def frequencies_agree_with_the_cut_distribution_asked_for(bench: Bench, options: dict):
    """Checks that the first tokens of responses follow the model's distribution, cut as `options` ask for (sampling
    fields of `Request`, such as `top_k`). An engine whose entry has `truncates_sampling` = False passes if it refuses
    such requests."""
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
