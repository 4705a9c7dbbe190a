"""An engine scores a text under the weights it holds, so that the weight check detects wrong ones."""

from collections.abc import Callable

import numpy as np
import torch

from april.weights.canary import Canary, canary_tokens
from april.weights.receiver import StagedWeights
from april.wire.version import Version
from april.workers.engines.base import Request
from april.workers.engines.conformance.checks import Bench, check, refusal
from april.workers.engines.conformance.driving import V0, V1, VOCABULARY, drive, join, prompt
from april.workers.engines.conformance.faults import FAULTS, Weights, a_step_further
from april.workers.engines.proof import WeightCheck

TEXT = canary_tokens(VOCABULARY)


@check()
def scores_are_those_of_a_plain_forward_pass_or_are_refused(bench: Bench):
    engine = bench.make_engine()
    if not bench.entry.scores:
        assert refusal(lambda: engine.score(TEXT))
        return
    scores = engine.score(TEXT)
    assert scores.dtype == np.float32 and engine.dtype == "float32"
    torch.testing.assert_close(torch.tensor(scores), bench.models().logprobs(TEXT.tolist(), 1), atol=1e-4, rtol=0)


@check(interrupts=True)
def a_score_changes_nothing_of_what_runs(bench: Bench):
    if not bench.entry.scores:
        return
    request = Request(1, prompt(), 300, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    engine = bench.make_engine()
    before = drive(engine, [request], tokens=50)
    engine.score(TEXT)
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
    engine, proof = bench.make_engine(version=None), WeightCheck()

    def load(version: Version, sent: Weights, published: Weights) -> None:
        engine.load_weights(version, sent)
        canary = Canary(TEXT.tolist(), model.logprobs_under(published, TEXT.tolist()).tolist(), "float32")
        staged = StagedWeights(version, None, 0.0, canary=canary, checksum=version.step)
        proof.judge(staged, canary, engine.score(TEXT), engine.dtype)

    load(V0, old, old)
    assert f"version {V1}" in refusal(lambda: load(V1, fault(old, new), new))
    load(V1, new, new)
    assert proof.failures == 0
