"""Tokens taken from the events of one request, in all forms that an SGLang server sends."""

import os

import numpy as np
import pytest

from april.wire.limits import FROM_PEER, MAX_CUT_CHUNK_TOKENS, MAX_SUPPORT_IDS
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, prompt
from april.workers.engines.sglang.client import ServerRefuses
from april.workers.engines.sglang.run import StreamedRequest
from april.workers.engines.sglang.weights import lock_folder, remove_stale

WHOLE = list(range(10, 18))


def event(ids, total, logprobs_of=None, finish=None):
    entries = [[-0.1 * token, token, None] for token in (ids if logprobs_of is None else logprobs_of)]
    meta = {"completion_tokens": total, "output_token_logprobs": entries, "finish_reason": finish}
    return {"output_ids": ids, "meta_info": meta}


def event_with_supports(ids, total, cut=None):
    """Events whose tokens have a support of two ids, and a log-probability that differs from the unrestricted one."""
    made, cut = event(ids, total), ids if cut is None else cut
    made["meta_info"]["output_token_sampling_mask"] = [[token, token + 1] for token in cut]
    made["meta_info"]["output_token_sampling_logprobs"] = [-0.01 * token for token in cut]
    return made


EVENTS = {
    "increments": [event(WHOLE[:3], 3), event(WHOLE[3:], 8)],
    "cumulative": [event(WHOLE[:3], 3), event(WHOLE, 8)],
    "aborted while it waited": [event(WHOLE[:3], 3), event(WHOLE[3:], 8), event(WHOLE[-1:], 8, WHOLE)],
    "the same, sent together": [event(WHOLE[:3], 3), event([*WHOLE[3:], WHOLE[-1]], 8, [*WHOLE[3:], *WHOLE])],
}


@pytest.mark.parametrize("form", EVENTS)
def test_every_token_is_taken_once_with_its_own_logprob(form):
    run = StreamedRequest(Request(1, prompt(), 20))
    assert sum(run.take_event(each, V0) for each in EVENTS[form]) == 8
    assert run.pending == run.generated == WHOLE and run.logprobs == [-0.1 * token for token in WHOLE]


def test_tokens_with_other_tokens_logprobs_are_refused():
    run = StreamedRequest(Request(1, prompt(), 20))
    for wrong in (event(WHOLE, 8, WHOLE[1:]), event(WHOLE, 8, [*WHOLE[:-1], 99])):
        with pytest.raises(ServerRefuses, match="those of others"):
            run.take_event(wrong, V0)
    assert run.generated == []


def test_a_logprob_that_is_not_finite_is_refused():
    run, wrong = StreamedRequest(Request(1, prompt(), 20)), event(WHOLE, 8)
    for value in (None, float("-inf")):
        wrong["meta_info"]["output_token_logprobs"][3][0] = value
        with pytest.raises(ServerRefuses, match="not finite"):
            run.take_event(wrong, V0)
    assert run.generated == []


def test_stale_snapshot_folders_are_removed_and_locked_ones_stay(tmp_path):
    held, left = tmp_path / "held", tmp_path / "left"
    for folder in (held, left):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    lock = lock_folder(held)
    for folder in (held, left):
        remove_stale(folder)
    assert left.exists(), "it may have been made a moment ago"
    for folder in (held, left):
        remove_stale(folder, idle_s=0.0)
    assert (held / "model.safetensors").exists() and not left.exists()
    os.close(lock)
    remove_stale(held, idle_s=0.0)
    assert not held.exists()


@pytest.mark.parametrize("cumulative", [False, True])
def test_every_token_keeps_its_support_and_its_logprob_within_it(cumulative):
    run = StreamedRequest(Request(1, prompt(), 20, top_k=2, with_support=True))
    run.take_event(event_with_supports(WHOLE[:3], 3), V0)
    run.take_event(event_with_supports(WHOLE if cumulative else WHOLE[3:], 8), V0)
    chunks = run.hand_over(5)
    assert [chunk.tokens.tolist() for chunk in chunks] == [WHOLE[:5], WHOLE[5:]]
    for chunk in chunks:
        assert chunk.support.holds(chunk.tokens)
        assert chunk.support.ids.reshape(-1, 2).tolist() == [[token, token + 1] for token in chunk.tokens]
        np.testing.assert_allclose(chunk.logprobs, -0.01 * chunk.tokens, rtol=1e-6)
    assert run.hand_over(5) == []


def test_tokens_without_their_supports_are_refused():
    run, too_large = (
        StreamedRequest(Request(1, prompt(), 20, top_k=2, with_support=True)),
        event_with_supports(WHOLE, 8),
    )
    too_large["meta_info"]["output_token_sampling_mask"][0] = list(range(MAX_SUPPORT_IDS + 1))
    for wrong, why in (
        (event(WHOLE, 8), "without the supports"),
        (event_with_supports(WHOLE, 8, cut=WHOLE[1:]), "without the supports"),
        (event_with_supports(WHOLE, 8, cut=WHOLE[::-1]), "not in its support"),
        (too_large, "lower sampling.top_k"),
    ):
        with pytest.raises(ServerRefuses, match=why):
            run.take_event(wrong, V0)
    assert run.generated == run.supports == []


def test_a_chunk_with_the_largest_supports_fits_into_a_frame():
    run = StreamedRequest(Request(1, prompt(), 1000, top_k=2, with_support=True))
    run.pending, run.logprobs, run.version = [0] * 300, [0.0] * 300, V0
    run.supports = [np.arange(MAX_SUPPORT_IDS, dtype=np.int32)] * 300
    chunks = run.hand_over(512)
    assert [len(chunk.tokens) for chunk in chunks] == [MAX_CUT_CHUNK_TOKENS, 300 - MAX_CUT_CHUNK_TOKENS]
    arrays = (chunks[0].tokens, chunks[0].logprobs, chunks[0].support.counts, chunks[0].support.ids)
    assert sum(array.nbytes for array in arrays) <= FROM_PEER.frame_bytes


@pytest.mark.parametrize(
    ("budget", "stop", "said", "reached"),
    [
        (20, {17}, "stop", "stop"), (8, {99}, "length", "length"), (20, {17}, "abort", "stop"),
        (8, {}, "abort", "length"),
        (8, {17}, "abort", "stop"), (9, {10}, "abort", None),
    ],
)  # fmt: skip
def test_an_abort_with_the_last_token_is_the_end_of_the_request(budget, stop, said, reached):
    run = StreamedRequest(Request(1, prompt(), budget, stop_token_ids=frozenset(stop)))
    run.take_event(event(WHOLE, 8), V0)
    assert run.end_reached(said) == reached
