"""What is kept of the events of one request, in the forms that an SGLang server gives them."""

import pytest

from april.workers.engines.base import Request
from april.workers.engines.sglang_client import ServerRefuses
from april.workers.engines.sglang_run import Run
from tests.workers.engine_driving import V0, prompt

WHOLE = list(range(10, 18))


def event(ids, total, logprobs_of=None, finish=None):
    entries = [[-0.1 * token, token, None] for token in (ids if logprobs_of is None else logprobs_of)]
    meta = {"completion_tokens": total, "output_token_logprobs": entries, "finish_reason": finish}
    return {"output_ids": ids, "meta_info": meta}


EVENTS = {
    "increments": [event(WHOLE[:3], 3), event(WHOLE[3:], 8)],
    "cumulative": [event(WHOLE[:3], 3), event(WHOLE, 8)],
    "aborted while it waited": [event(WHOLE[:3], 3), event(WHOLE[3:], 8), event(WHOLE[-1:], 8, WHOLE)],
    "the same, sent together": [event(WHOLE[:3], 3), event([*WHOLE[3:], WHOLE[-1]], 8, [*WHOLE[3:], *WHOLE])],
}


@pytest.mark.parametrize("form", EVENTS)
def test_every_token_is_taken_once_with_its_own_logprob(form):
    run = Run(Request(1, prompt(), 20))
    assert sum(run.take(each, V0) for each in EVENTS[form]) == 8
    assert run.pending == run.generated == WHOLE and run.logprobs == [-0.1 * token for token in WHOLE]


def test_tokens_with_logprobs_of_others_are_refused():
    run = Run(Request(1, prompt(), 20))
    for wrong in (event(WHOLE, 8, WHOLE[1:]), event(WHOLE, 8, [*WHOLE[:-1], 99])):
        with pytest.raises(ServerRefuses, match="those of others"):
            run.take(wrong, V0)
    assert run.generated == []


@pytest.mark.parametrize(
    ("budget", "stop", "said", "reached"),
    [
        (20, {17}, "stop", "stop"), (8, {99}, "length", "length"), (20, {17}, "abort", "stop"),
        (8, {}, "abort", "length"),
        (8, {17}, "abort", "stop"), (9, {10}, "abort", None),
    ],
)  # fmt: skip
def test_an_abort_with_the_last_token_is_the_end_of_the_request(budget, stop, said, reached):
    run = Run(Request(1, prompt(), budget, stop_token_ids=frozenset(stop)))
    run.take(event(WHOLE, 8), V0)
    assert run.end_reached(said) == reached
