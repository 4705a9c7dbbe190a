"""Checks that every token leaves the engine once and in order, however its request ends, and that a request which can
never run is refused at once."""

from dataclasses import replace
from functools import partial

import numpy as np

from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import (
    VOCABULARY,
    Bench,
    Stream,
    check,
    drive,
    join,
    prompt,
    refusal,
    requests_of_many_shapes,
)


@check()
def a_stream_has_no_gap_and_ends_once(bench: Bench):
    engine, requests = bench.make_engine(), requests_of_many_shapes()
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


@check()
def tokens_are_of_the_vocabulary_and_log_probabilities_at_most_zero(bench: Bench):
    for temperature in (1.0, 0.0, 0.5):
        streams = drive(bench.make_engine(), requests_of_many_shapes(temperature=temperature))
        tokens = [token for stream in streams.values() for token in stream.tokens]
        wrong = [token for token in tokens if not 0 <= token < VOCABULARY]
        assert not wrong, f"token {wrong[0]} is outside of the vocabulary, 0 to {VOCABULARY - 1}"
        logprobs = np.array([logprob for stream in streams.values() for logprob in stream.logprobs])
        assert np.isfinite(logprobs).all() and logprobs.max() <= 1e-3, f"a log-probability is {logprobs.max():g}"


@check()
def handed_over_arrays_are_never_written_again(bench: Bench):
    engine = bench.make_engine(chunk_tokens=3)
    streams = drive(engine, [Request(1, prompt(), 30, seed=1)])
    frozen = [(chunk.tokens.copy(), chunk.logprobs.copy()) for chunk in streams[1].chunks]
    drive(engine, [Request(2, prompt(), 30, seed=2)])
    for chunk, (tokens, logprobs) in zip(streams[1].chunks, frozen, strict=True):
        assert (chunk.tokens == tokens).all() and (chunk.logprobs == logprobs).all()


@check()
def more_requests_than_slots_all_finish(bench: Bench):
    engine = bench.make_engine(slots=3)
    requests = requests_of_many_shapes(25)
    assert 1 <= engine.capacity <= 3
    for request in requests[:5]:
        engine.submit(request)
    assert 0 <= engine.queued <= engine.live == 5
    streams = drive(engine, requests[5:])
    assert engine.queued == engine.live == 0
    assert [len(streams[r.id].tokens) for r in requests] == [r.max_new_tokens for r in requests]


@check(cases={f"after {tokens} tokens": {"tokens": tokens} for tokens in (0, 1, 7, 100)})
def cancel_hands_over_what_is_left(bench: Bench, tokens: int):
    request = Request(1, prompt(), 500, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    engine = bench.make_engine()
    before = drive(engine, [request, replace(request, id=2)], tokens=tokens)
    stream = join(before[1], Stream(engine.cancel(1)))
    assert stream.tokens == whole.tokens[: len(stream.tokens)] and stream.finish_reason is None
    assert tokens // 2 <= len(stream.tokens) < 500
    assert engine.cancel(1) == [] and engine.live == 1
    assert join(before[2], drive(engine)[2]).tokens == whole.tokens


@check()
def ids_that_are_not_live_are_passed_over_by_a_cancel(bench: Bench):
    engine = bench.make_engine()
    assert engine.cancel(3) == [] and engine.cancel_all(range(2000)) == []
    assert len(drive(engine, [Request(1, prompt(), 5)])[1].tokens) == 5
    assert engine.cancel_all([1, 2, 3]) == [] and engine.live == 0


@check(interrupts=True)
def many_are_cancelled_at_once_and_the_others_go_on(bench: Bench):
    requests = [Request(i, prompt(seed=i), 300, temperature=0.0) for i in range(24)]
    whole = drive(bench.make_engine(slots=24), requests)
    engine = bench.make_engine(slots=24)
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


CUT_ATTEMPTS = 5
"""Maximum number of attempts to cut a response: a server may generate all of it before a cancel reaches it."""


def cut_run(engine, request: Request, cuts: list[int]) -> list[Stream]:
    """Run a request, cancel it each time that as many more tokens as the next number in `cuts` have come, and resume it
    from all its tokens so far. Returns the segments between two cuts, fewer if a segment had ended before its cut."""
    segments, rest = list[Stream](), request
    for tokens in [*cuts, None]:
        before = drive(engine, [rest], tokens=tokens)[1]
        segments.append(join(before, Stream(engine.cancel(1))))
        context = np.concatenate([rest.tokens, np.array(segments[-1].tokens, np.int32)])
        rest = replace(rest, tokens=context, max_new_tokens=rest.max_new_tokens - len(segments[-1].tokens))
        if rest.max_new_tokens == 0:
            break
    return segments


@check(interrupts=True, cases={"cut once": {"cuts": [1]}, "cut three times": {"cuts": [5, 40, 90]}})
def a_resumed_greedy_run_equals_the_uninterrupted_one(bench: Bench, cuts: list[int]):
    request = Request(1, prompt(), 400, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    engine = bench.make_engine()
    for _ in range(CUT_ATTEMPTS):
        segments = cut_run(engine, request, cuts)
        if len(segments) > len(cuts):
            break
    stream = join(*segments)
    assert stream.tokens == whole.tokens
    assert [segment.finish_reason for segment in segments] == [None] * len(cuts) + ["length"]
    bench.assert_true_logprobs(request, stream)


@check()
def a_stop_token_ends_the_response_and_is_its_last_token(bench: Bench):
    free = drive(bench.make_engine(), [Request(1, prompt(), 50, temperature=0.0)])[1]
    stop = free.tokens[20]
    end = free.tokens.index(stop) + 1
    never = next(token for token in range(VOCABULARY) if token not in free.tokens)
    request = Request(1, prompt(), 50, temperature=0.0, stop_token_ids=frozenset({stop, never}))
    other = Request(2, prompt(), 50, temperature=0.0, stop_token_ids=frozenset({never}))
    streams = drive(bench.make_engine(), [request, other])
    assert streams[1].tokens == free.tokens[:end] and streams[1].finish_reason == "stop"
    assert streams[2].tokens == free.tokens and streams[2].finish_reason == "length"


@check()
def stop_tokens_in_the_prompt_and_of_a_slots_former_request_end_nothing(bench: Bench):
    engine = bench.make_engine(slots=1)
    everything = frozenset(range(VOCABULARY))
    first = drive(engine, [Request(1, prompt(), 10, stop_token_ids=everything)])[1]
    assert len(first.tokens) == 1 and first.finish_reason == "stop"
    assert len(drive(engine, [Request(2, prompt(), 10)])[2].tokens) == 10


@check()
def a_stop_token_as_the_last_token_of_the_budget_is_a_stop(bench: Bench):
    free = drive(bench.make_engine(), [Request(1, prompt(), 8, temperature=0.0)])[1]
    end = free.tokens.index(free.tokens[-1]) + 1
    request = Request(1, prompt(), end, temperature=0.0, stop_token_ids=frozenset({free.tokens[-1]}))
    assert drive(bench.make_engine(), [request])[1].finish_reason == "stop"


@check()
def a_context_may_be_filled_to_the_last_token(bench: Bench):
    request = Request(1, prompt(20), 44, seed=5)
    engine = bench.make_engine(max_context=64)
    assert engine.max_context == 64
    stream = drive(engine, [request])[1]
    assert len(stream.tokens) == 44
    bench.assert_true_logprobs(request, stream)


@check(interrupts=True)
def no_token_is_lost_or_handed_over_twice(bench: Bench):
    engine, rng, handed = bench.make_engine(slots=4), np.random.default_rng(0), 0
    for request in requests_of_many_shapes(40):
        handed += sum(len(stream.tokens) for stream in drive(engine, [request], steps=4).values())
        if rng.random() < 0.3:
            handed += sum(len(chunk.tokens) for chunk in engine.cancel(int(rng.integers(request.id + 1))))
        if rng.random() < 0.1:
            engine.load_weights(Version(0, request.id), bench.models(seed=request.id % 2).weights())
    handed += sum(len(stream.tokens) for stream in drive(engine).values())
    assert handed == engine.generated_tokens


# --- refused requests -------------------------------------------------------------------------------------------------

VALID_REQUEST = Request(1, prompt(), 5)
INVALID_REQUESTS = {
    "over the context": (replace(VALID_REQUEST, max_new_tokens=60), "max_context"),
    "no budget": (replace(VALID_REQUEST, max_new_tokens=0), "max_new_tokens"),
    "no tokens": (replace(VALID_REQUEST, tokens=np.zeros(0, np.int32)), "no tokens"),
    "not integers": (replace(VALID_REQUEST, tokens=np.ones(3)), "integer"),
    "two dimensions": (replace(VALID_REQUEST, tokens=np.ones((2, 2), np.int32)), "one-dimensional"),
    "beyond the vocabulary": (replace(VALID_REQUEST, tokens=np.array([3, VOCABULARY], np.int32)), "vocabulary"),
    "negative token": (replace(VALID_REQUEST, tokens=np.array([-1], np.int32)), "vocabulary"),
    "negative temperature": (replace(VALID_REQUEST, temperature=-0.5), "temperature"),
    "temperature is no number": (replace(VALID_REQUEST, temperature=float("nan")), "temperature"),
    "no mass": (replace(VALID_REQUEST, top_p=0.0), "top_p"),
    "negative top_k": (replace(VALID_REQUEST, top_k=-1), "top_k"),
}


@check(cases={case: {"request": request, "named": named} for case, (request, named) in INVALID_REQUESTS.items()})
def a_request_that_can_never_run_is_refused_with_a_sentence(bench: Bench, request: Request, named: str):
    """Checks that an engine refuses an invalid `request` at its submission with a sentence that contains `named`, and
    keeps serving other requests. An engine can do so by `april.workers.engines.entry.check_request`."""
    engine = bench.make_engine(max_context=64)
    sentence = refusal(lambda: engine.submit(request))
    assert named in sentence, sentence
    assert engine.live == 0 and len(drive(engine, [VALID_REQUEST])[1].tokens) == 5


@check()
def an_id_is_refused_while_it_is_live(bench: Bench):
    engine, long = bench.make_engine(slots=1), replace(VALID_REQUEST, max_new_tokens=600)
    drive(engine, [replace(long, id=1), replace(long, id=2)], steps=1)
    for live_id in (1, 2):
        assert "live already" in refusal(partial(engine.submit, replace(VALID_REQUEST, id=live_id)))
    engine.cancel_all([1, 2])
    assert len(drive(engine, [replace(VALID_REQUEST, id=1)])[1].tokens) == 5
