"""Discarded groups, held-out groups, reference answers and the sampling times of chunks reach the learner together with
the next batch if samples are kept; the same again after a restart of the broker."""

from types import SimpleNamespace

import pytest

from april import wire
from april.broker.ledger.chunk_refs import chunk_refs_in
from april.broker.telemetry import logged_groups
from tests.support.broker_conversation import (
    AGENTS,
    FakeAgents,
    FakeLearner,
    FakeWorker,
    damage,
    finish_evaluation,
    joined,
    training,
)

OPTIONS = ["--evaluation.prompts", "1", "--schedule.dynamic_sampling", "--broker.attempts", "1"]


@pytest.fixture
def talk(converse):
    return converse(*OPTIONS)


def to_first_batch(talk, worker):
    """Work until the first batch. All samples of groups 0, 1 and 2 get the same reward; a sample of group 3 dies. Each
    response has two chunks, sampled half a second apart."""
    waiting, places = finish_evaluation(worker), {}
    while talk.ledger.steps.next == 0:
        waiting += training(worker.grants())
        places |= {group.id: group.ordinal for group in talk.ledger.groups.values()}
        grant = waiting.pop(0)
        talk.tick(0.1)
        group = places[grant.group]
        rows = [(0.0, worker.new_tokens(grant, 0, 3)), (0.5, worker.new_tokens(grant, 3, 2, "stop"))]
        timed = [(row._replace(time=1_000_000.0 + group + at), payload) for at, (row, payload) in rows]
        if group == 3 and grant.index == 1:
            worker.report(timed[:1])
            worker.give_back(grant, 3, "generation_failed", "engine fell over")
        else:
            worker.report(timed[:1])
            worker.report(timed[1:])
            worker.score(grant, 1.0 if group < 3 else float(grant.index))
    return talk


def of(batch):
    """Discarded groups in a batch message, by reason."""
    found = {}
    for head in batch[0].groups:
        if head.discarded:
            found.setdefault(head.discarded, []).append(head)
    return found


def test_discards_and_chunk_times_come_with_the_next_batch_and_again_until_its_checkpoint(talk, worker, learner):
    to_first_batch(talk, worker)
    plain = learner.fetch(0)
    assert not of(plain) and plain[0].total == 4
    assert not any(sample.chunks for head in plain[0].groups for sample in head.samples)
    batch = learner.fetch(0, samples=True)
    assert batch[0].total == 8 and [len(group) for group in of(batch).values()] == [2, 1]
    assert [head.samples for head in batch[0].groups[:4]] != [head.samples for head in plain[0].groups]
    assert batch[1][: len(plain[1])] == plain[1], "the batch itself is the same"
    assert not any(head.label for head in plain[0].groups)
    rows = {group.id: group for group in talk.ledger.deliveries[0]}
    for head in batch[0].groups[:4]:
        group = rows[head.group]
        assert head.label == talk.service.context.prompts.row(group.epoch, group.row).label != ""
    (held_out,) = [head for head in batch[0].groups if head.held_out]
    assert (held_out.held_out, held_out.discarded, held_out.is_trained) == ("heldout", "", False)
    assert held_out.label == talk.service.context.prompts.held_out_row(0, 0).label
    assert {version.step for sample in held_out.samples for *_, version in sample.segments} == {0}
    for place, head in enumerate(of(batch)["zero_spread"]):
        assert [sample.reward for sample in head.samples] == [1.0, 1.0] and head.opened_at < head.delivered_at
        for sample in head.samples:
            assert sample.chunks == [(3, 1_000_000.0 + place), (5, 1_000_000.5 + place)]
            assert [span.outcome for span in sample.spans] == ["stop", "scored"]
    (dead,) = of(batch)["dead_sample"]
    assert [(one.attempts, one.error) for one in dead.samples if one.attempts] == [(1, "engine fell over")]
    assert any(one.reward != one.reward for one in dead.samples), "not known is no reward"
    assert len(batch[1]) == sum(1 + 2 * len(head.samples) for head in batch[0].groups)
    for with_snapshot in (False, True):
        if with_snapshot:
            talk.journal.rotate()
            talk.take_snapshot()
        talk.restart_broker()
        again = FakeLearner(talk, learner.name)
        again.hello()
        assert repr(again.fetch(0, samples=True)) == repr(batch)
    again.consume(0)
    again.durable(1)
    assert not list(talk.service.history.logged_groups.positions())


@pytest.mark.full
def test_unreadable_samples_of_a_discard_are_left_out(talk, worker, learner):
    to_first_batch(talk, worker)
    talk.restart_broker()
    bad, *others = [one for one in talk.service.history.logged_groups.of_step(0) if one.head.discarded]
    damage(talk, *next(chunk_refs_in(bad.chunks[0]))[:2])
    again = joined(FakeLearner(talk))
    batch = again.fetch(0, samples=True)
    unread, *read = [head for head in batch[0].groups if head.discarded]
    assert unread.samples == [] and len(read) == len(others) and all(head.samples for head in read)
    assert talk.ledger.account.counts["unreadable"] == 0 and not talk.service.run.read_only


@pytest.mark.full
def test_no_discards_are_kept_beyond_the_limits_or_without_sample_logs(talk, worker, learner, converse, monkeypatch):
    monkeypatch.setattr(logged_groups, "MOST_BYTES", 1)
    to_first_batch(talk, worker)
    assert talk.service.history.logged_groups.of_step(0) == [] and talk.ledger.account.counts["zero_spread"] == 3
    monkeypatch.undo()
    other = converse(*OPTIONS, "--samples.every", "0", "--run.name", "other")
    worker = joined(FakeWorker(other))
    FakeLearner(other).join()
    assert to_first_batch(other, worker).service.history.logged_groups.of_step(0) == []


@pytest.mark.full
def test_the_discarded_part_of_a_session_comes_with_its_offset(converse):
    """The first agent fails after 7 tokens. The second begins anew, and scores while the answer to its second message
    is still being generated: it never reads the turn of tokens 7 to 12."""
    talk = converse(*AGENTS)
    worker, agents = joined(FakeWorker(talk)), joined(FakeAgents(talk))
    told = next(told for told in agents.listen() if not told.evaluation)
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.give_back(told, 0, "agent_failed", "ValueError: no")
    again = [one for one in agents.listen() if (one.group, one.index) == (told.group, told.index)][-1]
    agents.say_to_policy(again.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.say_to_policy(again.lease_id, 7, 2)
    (grant,) = worker.grants()
    worker.chunk(grant, 9, 3)
    agents.score(again, 0.5)
    kept = talk.service.history.logged_groups
    kept.deliver(0)
    failed, unread = kept.of_step(0)
    assert failed.head.discarded == "agent_failed" and failed.head.samples[0].error == "ValueError: no"
    assert (failed.head.samples[0].response_tokens, failed.head.samples[0].discarded_from) == (7, 0)
    assert unread.head.discarded == "unread"
    assert (unread.head.samples[0].response_tokens, unread.head.samples[0].discarded_from) == (12, 7)


@pytest.mark.full
def test_a_dead_sample_of_a_trained_group_is_a_discard_of_its_own(converse):
    options = ["--schedule.min_group_size", "1", "--broker.attempts", "1"]
    talk = converse(*options)
    worker = joined(FakeWorker(talk))
    FakeLearner(talk).join()
    victim = finish_evaluation(worker)[0]
    worker.chunk(victim, 0, 5)
    worker.report(closings=[wire.GiveBack(victim.lease_id, 5, "generation_failed", "no")])
    leases = [lease for lease in talk.ledger.leases.values() if not lease.sample.group.evaluation]
    sibling = next(lease for lease in leases if lease.sample.group.id == victim.group)
    worker.report([worker.new_tokens(SimpleNamespace(lease_id=sibling.id, evaluation=False), 0, 4, "stop")])
    talk.ledger.score(sibling.id, 1.0)
    talk.service.history.logged_groups.deliver(0)
    (told,) = [one for one in talk.service.history.logged_groups.of_step(0) if one.head.discarded]
    assert told.head.discarded == "dead_sample" and [one.index for one in told.head.samples] == [victim.index]
    assert told.head.samples[0].response_tokens == 5


def test_a_run_that_fails_because_all_is_discarded_ends_with_those_discards(talk, worker, learner):
    assert learner.fetch(0, samples=True) is None
    waiting = finish_evaluation(worker)
    while not talk.service.run.over:
        worker.complete(waiting.pop(0), reward=0.0)
        waiting += training(worker.grants())
    (end,) = learner.take(wire.Finished)
    assert [head.discarded or head.held_out for head in end.message.groups] == ["heldout"] + ["zero_spread"] * 2
    assert [len(array) for array in end.arrays[1:3]] == [4, 4]
