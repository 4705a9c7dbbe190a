"""Token supports in the broker: required of every training token if sampling is truncated, refused for all other
tokens."""

import numpy as np
import pytest

from april import wire
from april.broker.journal.files import JournalError
from april.learner.source import decode_groups
from april.wire.limits import MAX_SUPPORT_IDS
from tests.support.broker_conversation import (
    FakeLearner,
    FakeWorker,
    chunk,
    chunk_arrays,
    finish_evaluation,
    joined,
    make_batch,
    observation,
    support_arrays,
    training,
)

CUT = ["--worker.engine", "sglang", "--sampling.top_k", "8", "--sampling.top_p", "0.9", "--sampling.min_p", "0.01",
       "--evaluation.prompts", "1", "--evaluation.top_p", "0.7"]  # fmt: skip
IN_TURNS = ["--environment.name", "calculator", "--environment.max_turn_tokens", "8"]


@pytest.fixture
def talk(converse):
    return converse(*CUT, *IN_TURNS)


def test_a_grant_says_what_to_draw_from(worker):
    grants = worker.grants()
    drawn = {grant.evaluation: (grant.top_k, grant.top_p, grant.min_p) for grant in grants}
    assert drawn == {True: (0, 0.7, 0.0), False: (8, 0.9, 0.01)}


def test_held_out_samples_of_the_logs_have_no_supports_and_do_not_take_those_of_others(talk, worker, learner):
    make_batch(worker)
    batch, arrays = learner.fetch(0, samples=True)
    groups = decode_groups(batch.groups, list(map(np.array, arrays)))
    sizes = {bool(head.held_out): sample.support.counts.tolist() for head, group in groups for sample in group}
    assert set(sizes[True]) == {0} and 0 not in sizes[False]
    assert [head.is_trained for head, _ in groups] == [True] * 4 + [False]


def test_supports_are_kept_over_partials_and_restarts_and_delivered_behind_the_tokens(talk, worker, learner):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 3)
    worker.report([observation(grant.lease_id, 3, chunk_arrays(3, 2)[0])])
    talk.restart_broker()
    worker = joined(FakeWorker(talk, worker.name), leases=[grant.lease_id])
    worker.report(closings=[wire.GiveBack(grant.lease_id, 5, "leave")])
    mine = (grant.group, grant.index)
    granted = {(one.group, one.index): one for one in worker.grants()}
    resumed = granted.pop(mine)
    assert [array.tolist() for array in resumed.arrays[1:]] == [[2, 3, 4, 5, 6]], "ids alone"
    worker.chunk(resumed, 5, 2, "stop")
    worker.report(closings=[wire.Scored(resumed.lease_id, [1.0], [{}])])
    learner = FakeLearner(talk, learner.name)
    learner.hello()
    others = training(granted.values())
    while not talk.ledger.steps.next:
        worker.complete(others.pop(0))
        others += training(worker.grants())
    batch, arrays = learner.fetch(0)
    rest, found = iter(arrays), {}
    for group in batch.groups:
        next(rest)
        for sample in group.samples:
            found[group.group, sample.index] = [next(rest) for _ in wire.TOKEN_ARRAYS]
    assert list(rest) == []
    assert found[mine] == [
        [2, 3, 4, 5, 6, 7, 8], [-0.5] * 3 + [0.0] * 2 + [-0.5] * 2, [1, 2, 3, 0, 0, 1, 2], [2, 0, 3, 0, 0, 4, 7, 0, 8],
    ]  # fmt: skip
    assert learner.fetch(0) == (batch, arrays), "the same again"


def amiss(counts, support):
    return [*chunk_arrays(0, 3), np.array(counts, "i4"), np.array(support, "i4")]


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        (chunk_arrays(0, 3), "come with their supports"),
        ([*chunk_arrays(0, 3), np.ones(3, "i4")], "drawn among them"),
        ([chunk_arrays(0, 3)[0]], "come with their supports"),
        (amiss([1, 1, 1], [2, 3, 5]), "drawn among them"),
        (amiss([1, 2, 1], [2, 3, 4]), "drawn among them"),
        (amiss([1, 1], [2, 3]), "drawn among them"),
        (amiss([0, 2, 1], [2, 3, 4]), "drawn among them"),
        (amiss([-1, 3, 1], [2, 3, 4]), "drawn among them"),
        (amiss([2, 1, 1], [2, -1, 3, 4]), "ids are from 0 to"),
        (amiss([2, 1, 1], [2, 10_000, 3, 4]), "ids are from 0 to"),
        (amiss([MAX_SUPPORT_IDS + 1, 1, 1], [2] * (MAX_SUPPORT_IDS + 1) + [3, 4]), f"at most {MAX_SUPPORT_IDS} ids"),
    ],
)
def test_an_invalid_support_is_refused(talk, worker, arrays, why):
    grant, before = finish_evaluation(worker)[0], talk.journal.end
    worker.report([chunk(grant.lease_id, 0, worker.version, arrays)])
    assert why in worker.answers("rejects")[-1][1] and talk.journal.end == before
    worker.chunk(grant, 0, 3)
    assert worker.answers("acks") == [(grant.lease_id, 3)], "as if nothing had been said"


def test_only_training_tokens_of_a_cut_distribution_have_supports(converse):
    """Supports of evaluation tokens, and of tokens sampled from the whole distribution, are refused."""
    for overrides, evaluation, wrong in ((CUT, True, "no others do"), (CUT[-4:], False, "no more")):
        talk = converse("--run.name", f"run-{evaluation}", *overrides)
        worker = joined(FakeWorker(talk))
        grant = next(grant for grant in worker.grants() if grant.evaluation == evaluation)
        ids, logprobs = chunk_arrays(0, 3)
        worker.report([chunk(grant.lease_id, 0, worker.version, [ids, logprobs, *support_arrays(ids)])])
        assert wrong in worker.answers("rejects")[-1][1]


def test_a_run_does_not_change_between_whole_and_cut(converse):
    converse(*CUT).journal.close()
    again = converse(*CUT, "--sampling.top_k", "9")
    again.journal.close()
    with pytest.raises(JournalError, match="another run"):
        converse()
