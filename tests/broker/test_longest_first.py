"""Of the samples of one policy version, the one with the longest expected response is handed out first; finished
siblings set the expectation."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from april.broker.conformance.runs import NumberedPrompts
from april.broker.ledger.ledger import Ledger, Rules
from april.broker.plan import make_schedule
from april.broker.schedules.schedule import choose_sample
from april.config import ScheduleSection
from april.wire.message import Version

GROUPS, GROUP_SIZE = 3, 3


class Run:
    """Three groups of three samples, all leased to one worker."""

    def __init__(self):
        section = ScheduleSection(
            kind="sync", rollout_batch_size=GROUPS, n_samples_per_prompt=GROUP_SIZE, max_staleness=0
        )
        self.schedule = make_schedule(section, NumberedPrompts(100, 1))
        self.ledger = Ledger(Rules(GROUPS, GROUP_SIZE, 0, max_response_tokens=1000))
        self.ledger.start_learner(0)
        self.schedule.advance(self.ledger)
        self.leases = [self.lease() for _ in range(GROUPS * GROUP_SIZE)]

    def lease(self):
        sample = choose_sample(self.schedule, self.ledger, Version(0, 0))
        return sample and self.ledger.lease(sample, "worker", 0, 0.0)

    def end(self, lease, tokens):
        self.ledger.add_chunk(lease.id, 0, tokens, Version(0, 0), "stop")

    def hand_back(self, lease, tokens):
        if tokens:
            self.ledger.add_chunk(lease.id, 0, tokens, Version(0, 0), "")
        self.ledger.end_lease(lease.id, "abort")

    def order(self):
        taken = []
        while sample := choose_sample(self.schedule, self.ledger, Version(0, 0)):
            self.ledger.lease(sample, "worker", 0, 0.0)
            taken.append(sample)
        return taken


def names(samples):
    return [(sample.group.id, sample.index) for sample in samples]


def test_the_oldest_version_goes_first_whatever_its_length():
    ledger = Ledger(Rules(batch_groups=2, group_size=2, max_staleness=3))
    ledger.start_learner(0)
    newer, older = (ledger.open_group(epoch=0, row=row, floor=0) for row in range(2))
    for group, step in ((newer, 1), (older, 0)):
        for sample in group.samples:
            ledger.lease(sample, "worker", step, 0.0)
    for lease in list(ledger.leases):
        ledger.end_lease(lease, "abort")
    order = []
    while sample := ledger.queue.take_started(1):
        ledger.lease(sample, "worker", 1, 0.0)
        order.append(sample.group.id)
    assert order == [older.id, older.id, newer.id, newer.id]


def test_a_partial_whose_sibling_became_long_goes_first():
    run = Run()
    run.end(run.leases[0], 30)
    for lease, tokens in zip(run.leases[1:], [5, 5, 20, 10, 10, 7, 6, 8], strict=True):
        run.hand_back(lease, tokens)
    assert names(run.order()) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 2), (2, 0), (2, 1)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), min_size=9, max_size=9), st.randoms())
def test_in_any_order_of_events_the_longest_expected_sample_goes_first(fates, random):
    run = Run()
    together = list(zip(run.leases, fates, strict=True))
    random.shuffle(together)
    for lease, (ends, tokens) in together:
        (run.end if ends else run.hand_back)(lease, tokens)
    taken = run.order()
    assert len(taken) == sum(not ends for ends, _ in fates)
    expected = [sample.expected_length for sample in taken]
    assert all(earlier >= later for earlier, later in pairwise(expected))
