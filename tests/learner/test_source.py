"""A batch is put together from the parts in which the broker sends it."""

import numpy as np

from april import wire
from april.learner.source import BrokerSource, is_whole


def part(first, total, tokens):
    """One group of one sample."""
    head = wire.GroupHead(first, 1, [wire.SampleHead(0, len(tokens), 1.0, "stop", [(0, len(tokens), (0, 0))])])
    arrays = [np.array([9], "i4"), np.array(tokens, "i4"), np.zeros(len(tokens), "f4")]
    return wire.Received(wire.Batch(4, first, total, [head]), arrays, 0, 0, [])


class AnswersInParts:
    """A connection that gives these parts to whoever asks for a batch, as long as it is not whole."""

    def __init__(self, parts):
        self.parts = parts

    def request_parts(self, message, whole):
        taken = []
        while not taken or not whole(taken):
            taken.append(self.parts.pop(0))
        return taken


def test_a_batch_is_whole_when_every_group_of_it_is_there():
    assert not is_whole([part(0, 2, [5])])
    assert is_whole([part(0, 2, [5]), part(1, 2, [6, 7])])
    assert is_whole([wire.Received(wire.Finished("all steps are done"), [], 0, 0, [])])


def test_a_part_that_comes_twice_is_taken_once():
    source = BrokerSource.__new__(BrokerSource)
    source.connection = AnswersInParts([part(0, 2, [5]), part(0, 2, [5]), part(1, 2, [6, 7])])
    batch = source.fetch(4)
    assert [sample.tokens.tolist() for group in batch.groups for sample in group] == [[9, 5], [9, 6, 7]]
