"""The queue of waiting samples drops all stale entries, and loses no waiting sample."""

from april.broker.ledger.queues import CLEANING_PUSHES, WaitingSamples
from april.broker.ledger.samples import Group, Sample, SampleState


def test_samples_that_no_longer_wait_take_no_memory():
    queue = WaitingSamples()
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
