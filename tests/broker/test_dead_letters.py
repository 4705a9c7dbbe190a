"""Samples that failed for good leave a bounded number of dead letters, their prompts are drawn again on request, and no
lease is held for ever."""

import pytest

from april.broker.conformance.runs import NumberedPrompts
from april.broker.ledger.admission import Verdict
from april.broker.ledger.dead_letters import MAX_LETTERS
from april.broker.ledger.ledger import Ledger, Rules
from april.broker.schedules.rounds import RoundSchedule
from april.config import ScheduleSection
from april.wire.message import Version


@pytest.fixture
def ledger():
    ledger = Ledger(Rules(batch_groups=2, group_size=2, max_staleness=5, max_attempts=2))
    ledger.start_learner(0)
    return ledger


def schedule_over(rows, groups=2):
    section = ScheduleSection(rollout_batch_size=2, over_sampling_batch_size=groups, max_steps=100)
    return RoundSchedule(section, NumberedPrompts(rows, 1))


def lease_next(ledger, schedule, **times):
    return ledger.lease(schedule.next_sample(ledger, 0), "w0", 0, **({"expires_at": 10.0} | times))


def kill_a_sample(ledger, schedule, at=7.0):
    """Fail the next sample until it is dead (out of attempts); returns the id of its group."""
    group = None
    while group is None or group.id in ledger.groups:
        lease = lease_next(ledger, schedule)
        group = group or lease.sample.group
        cause = "generation_failed" if lease.sample.group is group else "leave"
        ledger.end_lease(lease.id, cause, "engine fell over", at)
    return group.id


def complete(ledger, schedule):
    lease = lease_next(ledger, schedule)
    ledger.add_chunk(lease.id, 0, 1, Version(0, 0), "stop")
    ledger.score(lease.id, 1.0)


def test_a_dead_sample_leaves_a_letter_with_its_last_error(ledger):
    schedule = schedule_over(rows=10)
    schedule.advance(ledger)
    group = kill_a_sample(ledger, schedule)
    (letter,) = ledger.dead_letters.letters
    assert (letter.group, letter.index, letter.epoch, letter.row) == (group, 0, 0, 0)
    assert (letter.attempts, letter.error, letter.at, letter.outcome) == (2, "engine fell over", 7.0, "discarded")
    assert ledger.account.discarded.keys() == {"dead_sample"}


def test_a_requeued_prompt_goes_ahead_of_fresh_ones_once(ledger):
    schedule = schedule_over(rows=10)
    schedule.advance(ledger)
    group = kill_a_sample(ledger, schedule)
    assert ledger.requeue(group) is Verdict.OK
    assert ledger.requeue(group) is Verdict.DUPLICATE
    assert ledger.requeue(group + 1) is Verdict.INVALID
    schedule.advance(ledger)
    again = ledger.groups[max(ledger.groups)]
    assert (again.epoch, again.row) == (0, 0) and ledger.prompts.next == (0, 2)
    assert ledger.dead_letters.letters[0].outcome == "redrawn" and not ledger.dead_letters.requeued
    assert ledger.requeue(group) is Verdict.DUPLICATE


def test_requeueing_goes_on_with_a_run_whose_prompts_are_exhausted(ledger):
    schedule = schedule_over(rows=1)
    schedule.advance(ledger)
    group = kill_a_sample(ledger, schedule)
    schedule.advance(ledger)
    assert schedule.finished(ledger)
    ledger.requeue(group)
    assert not schedule.finished(ledger)
    schedule.advance(ledger)
    complete(ledger, schedule)
    complete(ledger, schedule)
    schedule.advance(ledger)
    assert schedule.finished(ledger) and [group.row for group in ledger.deliveries[0]] == [0]


def test_letters_are_bounded_and_the_total_is_counted(ledger):
    schedule = schedule_over(rows=MAX_LETTERS + 10)
    for _ in range(MAX_LETTERS + 5):
        schedule.advance(ledger)
        kill_a_sample(ledger, schedule)
    assert len(ledger.dead_letters.letters) == MAX_LETTERS and ledger.dead_letters.total == MAX_LETTERS + 5
    assert ledger.requeue(0) is Verdict.INVALID


def test_renewals_keep_a_lease_up_to_its_end_and_no_longer(ledger):
    schedule = schedule_over(rows=10)
    schedule.advance(ledger)
    lease = lease_next(ledger, schedule, expires_at=10.0, ends_at=25.0)
    for now in (5.0, 14.0, 20.0):
        assert ledger.expire(now) == [] and ledger.renew([lease.id], now + 10.0) == []
    assert lease.expires_at == 25.0
    assert ledger.expire(25.0) == [lease]
    assert lease.sample.attempts == 1 and "broker.max_run_s" in lease.sample.last_error
    assert ledger.renew([lease.id], 35.0) == [lease.id]


def test_the_error_of_an_expired_lease_says_that_it_was_not_renewed(ledger):
    schedule = schedule_over(rows=10)
    schedule.advance(ledger)
    lease = lease_next(ledger, schedule, expires_at=10.0, ends_at=25.0)
    ledger.expire(10.0)
    assert lease.sample.last_error == "the lease was not renewed"
