"""The staleness bound on a ledger without a broker: ages of groups, aborts and batches."""

import pytest

from april.broker.ledger.ledger import Ledger, LedgerError, Rules
from april.wire.message import Version
from tests.support.continuous_schedule import Run


@pytest.fixture
def ledger():
    ledger = Ledger(Rules(batch_groups=1, group_size=2, max_staleness=3))
    ledger.start_learner(0)
    ledger.start_round()
    return ledger


def lease_all(ledger, group, step=0):
    for sample in group.samples:
        ledger.lease(sample, "worker", step, 0.0)


def test_the_age_of_a_group_counts_from_its_first_worker_s_version(ledger):
    group = ledger.open_group(epoch=0, row=0, floor=0)
    ledger.lease(group.samples[0], "worker", 2, 0.0)
    assert group.opened_at == 2
    with pytest.raises(LedgerError, match="step 2, not 1"):
        ledger.lease(group.samples[1], "worker", 1, 0.0)


def test_an_abort_reaches_every_lease_granted_before_it(ledger):
    lease_all(ledger, ledger.open_group(epoch=0, row=0, floor=0))
    ledger.end_round()
    aborted = list(ledger.leases)
    assert len(aborted) == 2 and all(map(ledger.is_aborted, aborted))
    lease_all(ledger, ledger.open_group(epoch=0, row=1, floor=0))
    assert not any(ledger.is_aborted(later) for later in ledger.leases if later not in aborted)


def test_an_abort_spares_scoring_and_evaluation(ledger):
    lease_all(ledger, ledger.open_group(epoch=0, row=0, floor=0))
    ended, generating = ledger.leases
    ledger.add_chunk(ended, 0, 3, Version(0, 0), "stop")
    lease_all(ledger, ledger.open_group(epoch=0, row=0, floor=0, evaluation=True))
    ledger.end_round()
    assert [lease_id for lease_id in ledger.leases if ledger.is_aborted(lease_id)] == [generating]


def test_no_group_is_in_two_batches():
    run = Run()
    leases = run.fill()
    for first in range(0, len(leases), 4):
        run.finish(*leases[first : first + 4])
        run.consume()
    delivered = [group.id for groups in run.ledger.deliveries.values() for group in groups]
    assert len(delivered) == 4 and sorted(delivered) == sorted(set(delivered))
    assert run.ledger.account.closed
