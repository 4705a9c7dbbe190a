"""A request that can never run is refused when it is submitted, with a sentence."""

from dataclasses import replace
from functools import partial

import numpy as np

from april.workers.engines.base import Request
from april.workers.engines.conformance.checks import Bench, check, refusal
from april.workers.engines.conformance.driving import VOCABULARY, drive, prompt

GOOD = Request(1, prompt(), 5)
BAD = {
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


@check(cases={case: {"request": request, "named": named} for case, (request, named) in BAD.items()})
def a_request_that_can_never_run_is_refused_with_a_sentence(bench: Bench, request: Request, named: str):
    """An engine can use `april.workers.engines.checks.check_request` for all of these."""
    engine = bench.make_engine(max_context=64)
    sentence = refusal(lambda: engine.submit(request))
    assert named in sentence, sentence
    assert engine.live == 0 and len(drive(engine, [GOOD])[1].tokens) == 5


@check()
def an_id_is_refused_while_it_is_live(bench: Bench):
    engine, long = bench.make_engine(slots=1), replace(GOOD, max_new_tokens=600)
    drive(engine, [replace(long, id=1), replace(long, id=2)], steps=1)
    for live_id in (1, 2):
        assert "live already" in refusal(partial(engine.submit, replace(GOOD, id=live_id)))
    engine.cancel_all([1, 2])
    assert len(drive(engine, [replace(GOOD, id=1)])[1].tokens) == 5
