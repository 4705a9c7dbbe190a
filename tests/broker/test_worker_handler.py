"""The broker's answers to workers without sockets: leases, chunks, scores and lost leases."""

from types import SimpleNamespace

import numpy as np
import pytest

from april import wire
from april.wire.message import Version
from tests.support.broker_conversation import (
    FakeLearner,
    FakeWorker,
    chunk,
    finish_evaluation,
    joined,
    make_batch,
    training,
)


def test_a_worker_gets_as_many_leases_as_it_has_room_for(worker):
    grants = worker.grants()
    assert len(grants) == 10
    assert len({grant.lease_id for grant in grants}) == len({grant.seed for grant in grants}) == 10


def test_a_worker_without_weights_or_control_connection_gets_nothing(talk):
    worker = FakeWorker(talk)
    worker.hello()
    assert worker.grants() == []


def test_a_grant_carries_prompt_label_and_budget(talk, worker):
    grant = worker.grants()[-1]
    tokens, response = grant.arrays
    assert not len(response)
    text = talk.service.prompts.tokenizer.decode(tokens)
    assert len(tokens) == len(text) and text.endswith("=")
    assert grant.max_new_tokens == 24 and grant.label.isdigit() and grant.reward == "final_answer"


@pytest.mark.parametrize("reward", ["trl:mine:func", "exact"])
def test_a_grant_carries_the_row_s_prompt_for_a_reward_that_gets_it(converse, reward):
    talk = converse("--reward.name", reward)
    grant = joined(FakeWorker(talk)).grants()[-1]
    text = talk.service.prompts.tokenizer.decode(grant.arrays[0])
    assert grant.row_prompt == (f'"{text}"' if reward.startswith("trl:") else "")


def test_an_id_beyond_the_vocabulary_is_refused(talk, worker):
    grant = worker.grants()[0]
    for largest, answer in ((talk.config.vocabulary - 1, "acks"), (talk.config.vocabulary, "rejects")):
        arrays = [np.array([largest], "i4"), np.zeros(1, "f4")]
        worker.report([chunk(grant.lease_id, largest % 2, worker.version, arrays)])
        assert worker.answers(answer)


def test_a_repeated_chunk_is_a_duplicate_and_a_gap_is_nacked(worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3)
    worker.chunk(grant, 0, 3)
    assert worker.answers("acks") == [(grant.lease_id, 3)] * 2
    worker.chunk(grant, 5, 2)
    assert worker.answers("nacks")[-1] == (grant.lease_id, 3)
    worker.report(closings=[wire.GiveBack(grant.lease_id, 5, "abort")])
    assert worker.answers("nacks")[-1][1] == 3


def test_a_chunk_that_comes_again_counts_once(talk, worker):
    grant = worker.grants()[0]
    for start, count in ((0, 3), (0, 3), (1, 4), (3, 2)):
        worker.chunk(grant, start, count)
    assert talk.ledger.account.tokens["generated"] + talk.ledger.account.tokens["evaluation"] == 5


def test_a_score_ahead_of_its_tokens_asks_for_them(worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3)
    worker.report(closings=[wire.Scored(grant.lease_id, [1.0], [{}])])
    assert worker.answers("nacks")[-1][1] == 3


def test_an_older_holder_is_refused_for_ever_and_its_tokens_counted(talk, worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3)
    worker.report(closings=[wire.GiveBack(grant.lease_id, 3, "generation_failed", "engine fell over")])
    worker.chunk(grant, 3, 4)
    assert worker.answers("rejects") == [(grant.lease_id, "the lease is not current")]
    assert talk.service.peers.refused_tokens() == 4
    assert talk.ledger.account.closed


@pytest.mark.parametrize("chunks", [[25], [24], [20, 5]], ids=["exceeded", "full without a finish reason", "twice"])
def test_the_budget_counts_what_was_acknowledged_before(talk, worker, chunks):
    """A response beyond its budget is a failed lease, and no more tokens."""
    grant = worker.grants()[0]
    for index, count in enumerate(chunks):
        worker.chunk(grant, sum(chunks[:index]), count)
    assert "invalid" in worker.answers("rejects")[-1][1]
    tokens = talk.ledger.account.tokens
    assert tokens["generated"] + tokens["evaluation"] == sum(chunks[:-1])
    assert grant.lease_id not in talk.ledger.leases


def test_a_lease_is_its_holder_s_alone(talk, worker):
    grant = worker.grants()[0]
    other = joined(FakeWorker(talk, "w1"))
    other.chunk(grant, 0, 3)
    assert "not current" in other.answers("rejects")[-1][1]
    assert talk.ledger.account.tokens["generated"] + talk.ledger.account.tokens["evaluation"] == 0


def test_a_lease_s_number_is_never_used_again(talk, worker):
    seen = set(talk.ledger.leases)
    for start in range(3):
        talk.restart_broker()
        talk.tick(20.0)
        assert not talk.ledger.leases
        FakeWorker(talk, f"w{start}").join()
        assert len(talk.ledger.leases) == 10 and min(talk.ledger.leases) > max(seen)
        seen |= set(talk.ledger.leases)


def test_a_version_that_was_never_published_is_refused(talk, worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3, version=Version(0, 1))
    assert "invalid" in worker.answers("rejects")[-1][1]
    worker.say(wire.WorkerCapacity(Version(0, 1), 5))
    assert "never published" in worker.take(wire.Refused)[-1].message.reason
    assert next(iter(talk.service.peers.workers())).version == Version(0, 0)


def test_a_lost_worker_s_sample_goes_on_elsewhere_with_every_acknowledged_token(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 5)
    other = FakeWorker(talk, "w1")
    talk.now += 9.0
    other.join()
    talk.tick(2.0)
    resumed = {(g.group, g.index): g for g in other.grants()}[grant.group, grant.index]
    assert np.concatenate(resumed.arrays[1:]).tolist() == [2, 3, 4, 5, 6]
    assert resumed.max_new_tokens == 19 and resumed.seed == grant.seed
    worker.chunk(grant, 5, 1)
    assert "unknown session" in worker.take(wire.Refused)[-1].message.reason


def test_a_sample_that_came_in_several_chunks_goes_on_with_all_of_them(talk, worker):
    grant = finish_evaluation(worker)[0]
    for start, count in ((0, 3), (3, 1), (4, 2)):
        worker.chunk(grant, start, count)
    worker.say(wire.Goodbye())
    other = joined(FakeWorker(talk, "w1"))
    resumed = {(g.group, g.index): g for g in other.grants()}[grant.group, grant.index]
    assert np.concatenate(resumed.arrays[1:]).tolist() == [2, 3, 4, 5, 6, 7]


def test_a_restarted_worker_frees_its_predecessor_s_samples_at_once(talk, worker):
    held = {(grant.group, grant.index) for grant in worker.grants()}
    successor = joined(FakeWorker(talk, "w0", uid="another-process"))
    assert {(grant.group, grant.index) for grant in successor.grants()} == held


def test_a_worker_that_fell_silent_may_come_back_with_what_is_still_its_own(talk, worker):
    tokens = [grant.lease_id for grant in worker.grants()]
    welcome = worker.join(leases=[*tokens, 12345])
    assert welcome.lost_lease_ids == [12345]
    assert set(tokens) <= set(talk.ledger.leases)


def test_a_predecessor_that_still_lives_is_told_to_stop(talk, worker):
    successor = FakeWorker(talk, "w0-again")
    successor.say(wire.Hello("worker", "w0", "another-process"))
    assert "taken the name" in worker.take(wire.Stop)[-1].message.reason
    assert [session.uid for session in talk.service.peers.workers()] == ["another-process"]


def test_what_was_generated_but_not_scored_is_only_scored_again(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 5, "stop")
    successor = joined(FakeWorker(talk, "w0", uid="another-process"))
    again = next(g for g in successor.grants() if (g.group, g.index) == (grant.group, grant.index))
    assert again.scoring and again.finish_reason == "stop"
    assert [len(array) for array in again.arrays[1:]] == [5]
    successor.report(closings=[wire.Scored(again.lease_id, [0.0], [{}])])
    assert successor.answers("done") == [again.lease_id]


def test_a_sample_that_keeps_failing_is_dead_and_its_group_discarded_with_the_reason(talk, worker):
    group = finish_evaluation(worker)[0].group
    for _ in range(200):
        if group not in talk.ledger.groups:
            break
        for grant in worker.grants():
            if grant.group == group:
                worker.report(closings=[wire.GiveBack(grant.lease_id, 0, "generation_failed", "no")])
            else:
                worker.complete(grant)
        for lease_id, lease in list(talk.ledger.leases.items()):
            if lease.sample.group.id == group:
                worker.report(closings=[wire.GiveBack(lease_id, lease.sample.length, "generation_failed", "no")])
    assert talk.ledger.account.counts["dead_sample"] == 1
    assert talk.ledger.account.closed


def test_a_discarded_group_s_other_samples_are_cancelled(talk, worker):
    grants = finish_evaluation(worker)
    group = grants[0].group
    siblings = [grant.lease_id for grant in grants if grant.group == group][1:]
    lease_id = grants[0].lease_id
    while lease_id in talk.ledger.leases:
        sample = talk.ledger.leases[lease_id].sample
        worker.report(closings=[wire.GiveBack(lease_id, 0, "generation_failed", "no")])
        lease_id = sample.lease_id
    assert {lease_id for cancel in worker.take(wire.Cancel) for lease_id in cancel.message.lease_ids} >= set(siblings)


def test_a_worker_that_does_not_read_is_sent_no_more_than_its_credit(talk, worker):
    sent = len(worker.grants())
    talk.service.context.credit_bytes = 1
    worker.hold(0, capacity=50)
    talk.tick()
    assert worker.grants() == []
    received = talk.service.peers.workers()[0].sent_bytes
    worker.say(wire.Heartbeat([], 0, received), connection=b"control")
    assert 1 <= len(worker.grants()) < 50 - sent


def test_an_abort_that_is_not_answered_ends_with_its_deadline(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    worker.hold(1)
    held = list(talk.ledger.leases)
    assert held
    for _ in range(8):
        worker.say(wire.Heartbeat(held))
        talk.tick(1.0)
    assert not set(held) & set(talk.ledger.leases)
    resumed = training(worker.grants())
    assert resumed
    assert all(talk.ledger.leases[grant.lease_id].sample.attempts == 0 for grant in resumed)


def test_an_older_version_than_the_lease_s_is_refused(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    worker.say(wire.Goodbye())
    fresh = joined(FakeWorker(talk, "w9"), step=1)
    grant = training(fresh.grants())[0]
    fresh.chunk(grant, 24 - grant.max_new_tokens, 1, version=Version(0, 0))
    assert fresh.answers("rejects")


@pytest.mark.parametrize("replay_s", [0.0, 60.0])
def test_leases_of_workers_that_do_not_come_back_end_after_a_restart(talk, worker, replay_s):
    """What the replay takes is no part of their time."""
    talk.restart_broker()
    talk.now += replay_s
    talk.service.begin(talk.now)
    talk.tick(5.0)
    assert talk.ledger.leases
    talk.tick(6.0)
    assert not talk.ledger.leases


def test_a_session_whose_connections_are_gone_is_granted_nothing_more(talk, worker):
    held = set(talk.ledger.leases)
    talk.service.peers.invalidate(b"w0/data")
    talk.ledger.end_lease(min(held), "lost")
    talk.tick()
    assert set(talk.ledger.leases) < held


def test_with_a_smaller_least_group_the_dead_sample_s_tokens_are_counted_apart(converse):
    talk = converse("--schedule.min_group_size", "1", "--broker.attempts", "1")
    worker, learner = joined(FakeWorker(talk)), joined(FakeLearner(talk))
    victim = finish_evaluation(worker)[0]
    worker.chunk(victim, 0, 5)
    worker.report(closings=[wire.GiveBack(victim.lease_id, 5, "generation_failed", "no")])
    for lease in [lease for lease in talk.ledger.leases.values() if not lease.sample.group.evaluation]:
        worker.complete(SimpleNamespace(lease_id=lease.id, evaluation=False))
    batch = None
    for _ in range(20):
        batch = batch or learner.fetch(0)
        for grant in training(worker.grants()):
            worker.complete(grant)
    sizes = {group.group: len(group.samples) for group in batch[0].groups}
    assert sizes[victim.group] == 1 and sum(sizes.values()) == 7
    assert talk.ledger.account.discarded["dead_sample"] == 5 and talk.ledger.account.closed
    assert talk.ledger.account.tokens["delivered"] == 7 * 4
