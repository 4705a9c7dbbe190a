"""Rules of the schedule `continuous`: when groups are opened and how many samples are in flight."""

import pytest

from april.broker.ledger.samples import GroupState
from april.broker.plan import make_schedule
from tests.support.continuous_schedule import N, Run


def groups_of(leases):
    return [lease.sample.group.id for lease in leases]


def test_at_most_in_flight_samples_are_generated_and_a_finished_one_is_replaced():
    run = Run(in_flight=3)
    leases = run.fill()
    assert groups_of(leases) == [0, 0, 1]
    run.finish(leases[0])
    assert groups_of(run.fill()) == [1]


def test_groups_are_opened_on_demand_up_to_the_staleness_bound():
    run = Run()
    assert run.ledger.open_groups() == []
    assert groups_of(run.fill(step=0)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {group.opened_at for group in run.ledger.open_groups()} == {0}


def test_a_batch_is_made_when_the_learner_has_none_and_takes_the_oldest_groups():
    run = Run(in_flight=8)
    first = run.fill(step=0)
    run.finish(*first[:4])
    run.finish(*first[4:6])
    run.consume()
    assert run.ledger.steps.next == 1, "batch 1 waits: group 3 would be overdue without it"
    newer = run.fill(step=1)
    run.finish(*newer)
    assert run.ledger.steps.next == 1 and len(run.ledger.ready) > N
    run.finish(*first[6:])
    assert [group.id for group in run.ledger.deliveries[1]] == [2, 3]


def test_a_run_goes_on_with_more_steps():
    run = Run(max_steps=1, in_flight=8)
    leases = run.fill()
    run.finish(*leases[:4])
    for lease in leases[4:]:
        run.ledger.end_lease(lease.id, "abort")
    run.consume()
    run.schedule = make_schedule(run.section.model_copy(update={"max_steps": 2}), run.prompts)
    run.schedule.advance(run.ledger)
    assert groups_of(run.fill(step=1))[:4] == [2, 2, 3, 3]


def test_no_group_is_opened_once_the_remaining_batches_are_complete():
    run = Run(max_steps=2, in_flight=4)
    run.finish(*run.fill())
    run.finish(*run.fill(step=0))
    assert run.ledger.account.counts[GroupState.READY] == N and run.lease(step=0) is None


@pytest.mark.parametrize(("last_batch", "sizes"), [("train", [2, 1]), ("drop", [2])])
def test_exhausted_prompts_make_a_short_last_batch_or_none(last_batch, sizes):
    run = Run(prompts=3, last_batch=last_batch)
    ended = run.finish(*run.fill())
    assert not ended or last_batch == "drop"
    assert run.consume() is (last_batch == "train")
    assert run.schedule.finished(run.ledger)
    assert [len(groups) for groups in run.ledger.deliveries.values()] == sizes


@pytest.mark.parametrize(("longest", "batches"), [(3, 1), (4, 5 / 3), (1000, 2)])
def test_with_a_waiting_batch_groups_are_opened_only_as_far_as_stragglers_delay_them_anyway(longest, batches):
    """With 8 responses of 3 tokens in flight and 4 in a batch, 8 * longest / 12 batches complete while the longest
    response runs."""
    run = Run(in_flight=8, longest=longest)
    run.finish(*run.fill()[:4])
    assert run.schedule.backlog(run.ledger) == 2, "nothing is trained yet"
    run.consume()
    assert run.schedule.backlog(run.ledger) == pytest.approx(batches)


@pytest.mark.parametrize(("staleness", "opened", "replaced"), [(3, [8, 8, 9, 9], [10, 10, 11, 11]), (2, [], [])])
def test_without_late_stragglers_a_backlog_does_not_reduce_the_samples_in_flight(staleness, opened, replaced):
    """With 8 responses of 3 tokens in flight, equally long in all groups, 4 groups and a batch of 2 may be undelivered.

    Two batches complete while the longest response runs, so that a bound of 2 has no room for a batch that waits.
    """
    run = Run(in_flight=8, longest=3, staleness=staleness)
    run.finish(*run.fill())
    run.consume()
    run.finish(*run.fill(step=1))
    assert len(run.ledger.ready) == 2 * N
    assert groups_of(run.fill(step=1)) == opened
    run.consume()
    assert groups_of(run.fill(step=2)) == replaced
