"""The counters of samples by state equal a count over all samples."""

import random
from collections import Counter

import pytest

from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import ENDED, GroupState
from april.broker.telemetry.sample_history import SampleHistory
from tests.support.ledger_steps import write_steps


def check(ledger):
    for evaluation in (False, True):
        here = [group for group in ledger.groups.values() if group.evaluation == evaluation]
        groups = [group for group in here if group.state is GroupState.OPEN]
        assert ledger.open_samples.by_state(evaluation) == Counter(
            str(sample.state) for group in groups for sample in group.samples
        )
        assert all(
            group.pending_samples == sum(sample.state not in ENDED for sample in group.samples) for group in groups
        )


@pytest.mark.parametrize("seed", range(3))
def test_counters_equal_the_count_before_every_event_and_after_a_restart(seed):
    ledger = Ledger(Rules(2, 2, 3), write=lambda event, arrays: check(ledger))
    ledger.start_learner(0)
    chance = random.Random(seed)
    for step in range(8):
        write_steps(ledger, SampleHistory(ledger), chance, steps=1)
        lost = ledger.open_group(0, step, floor=step, evaluation=True)
        for sample in lost.samples:
            while sample.state not in ENDED:
                lease = ledger.lease(sample, "w0", step, expires_at=1.0)
                ledger.end_lease(lease.id, "lost")
        again = Ledger(ledger.rules)
        thaw(freeze(ledger), again)
        check(again)
    assert ledger.steps.consumed == 8
