"""The queue of waiting samples keeps nothing of those that wait no longer, and loses none that does."""

from april.broker.ledger.queues import CLEANING_PUSHES, Waiting
from april.broker.ledger.samples import Group, Sample, SampleState


def test_what_waits_no_longer_takes_no_room():
    queue = Waiting()
    group = Group(1, 0, False, 0, 0, 0, None, 1)
    kept = [Sample(group, index) for index in range(7)]
    for sample in kept:
        queue.push(sample, (sample.index,))
    for index in range(20 * CLEANING_PUSHES):
        gone = Sample(group, 100 + index)
        queue.push(gone, (gone.index,))
        gone.state = SampleState.LEASED
        assert sum(map(len, queue._by_step.values())) <= CLEANING_PUSHES + len(kept)
    taken = [queue.take(0) for _ in kept]
    assert taken == kept and queue.take(0) is None
