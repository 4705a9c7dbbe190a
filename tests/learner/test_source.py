"""The learner's broker client: batches in parts, concurrent reports, a broker that restarts or disappears."""

import contextlib
import queue
import time

import numpy as np
import pytest

from april import wire
from april.learner.batch import TrainingBatch, decode, encode, group_forks
from april.learner.source import BrokerSource, decode_groups, has_whole_batch
from april.util.lifetime import in_background
from april.wire.sockets.broker import BrokerUnreachable


def part(first, total, tokens):
    """A message part with one group of one sample."""
    head = wire.GroupHead(first, 1, [wire.SampleHead(0, len(tokens), 1.0, "stop", [(0, len(tokens), (0, 0))])])
    arrays = [np.array([9], "i4"), np.array(tokens, "i4"), np.zeros(len(tokens), "f4")]
    return wire.Received(wire.Batch(4, first, total, [head]), [wire.pack(array) for array in arrays])


class FakeConnection:
    """A broker in memory: what it `says` reaches the source, what the source sends is in `heard`."""

    def __init__(self, *_):
        self.heard, self.inbox, self.hellos = [], queue.Queue(), 0
        self.closed = False

    def hello(self, lease_ids):
        self.hellos += 1

    def wake_by(self, descriptor):
        pass

    def send(self, message, arrays=()):
        self.heard.append(message)
        return len(self.heard)

    def says(self, message, to, arrays=()):
        """Answer the latest message that equals `to`."""
        deadline = time.monotonic() + 30
        while to not in self.heard:
            assert time.monotonic() < deadline, f"{to} never came; heard {self.heard}"
            time.sleep(0.005)
        sequence = len(self.heard) - self.heard[::-1].index(to)
        self.inbox.put(wire.Received(message, [wire.pack(array) for array in arrays], 1, sequence))

    def receive(self, timeout_ms):
        with contextlib.suppress(queue.Empty):
            received = self.inbox.get(timeout=0.02)
            if isinstance(received, Exception):
                raise received
            yield received

    def is_disowned(self, received):
        return isinstance(received.message, wire.Refused) and "unknown session" in received.message.reason

    def goodbye(self):
        pass

    def check_alive(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def source(monkeypatch):
    monkeypatch.setattr("april.learner.source.BrokerConnection", FakeConnection)
    source = BrokerSource("tcp://broker", "tcp://weights", patience_s=1)
    yield source
    source.close()


CONSUMED = wire.Consumed(3, {"loss": 0.5})


def test_a_batch_is_complete_once_every_group_has_arrived():
    assert not has_whole_batch([part(0, 2, [5])])
    assert has_whole_batch([part(0, 2, [5]), part(1, 2, [6, 7])])
    assert has_whole_batch([wire.Received(wire.Finished("all steps are done"), [])])


def test_four_arrays_per_sample_include_its_supports():
    one = part(0, 1, [5, 6])
    [(_, [whole])] = decode_groups(one.message.groups, one.arrays)
    [(_, [cut])] = decode_groups(one.message.groups, [*one.arrays, np.array([2, 1], "i4"), np.array([5, 7, 6], "i4")])
    assert whole.support is None and whole.tokens.tolist() == cut.tokens.tolist() == [9, 5, 6]
    assert (cut.support.counts.tolist(), cut.support.ids.tolist()) == ([2, 1], [5, 7, 6])


def test_the_prefix_of_a_fork_is_its_prompt_and_has_no_loss():
    heads = [
        wire.SampleHead(0, 5, 1.0, "stop", [(2, 5, (0, 0))]),
        wire.SampleHead(0, 8, 1.0, "stop", [(6, 8, (0, 1))], fork=1),
    ]
    arrays = [np.array(ids, "i4") for ids in ([], range(5), range(8))]
    logprobs = [np.array([0, 0, -1, -1, -1], "f4"), np.array([0] * 6 + [-2, -2], "f4")]
    message = wire.Batch(0, 0, 1, [wire.GroupHead(7, 0, heads)])
    [(_, group)] = decode_groups(message.groups, [arrays[0], arrays[1], logprobs[0], arrays[2], logprobs[1]])
    found = [(row.index, row.fork, row.prompt_tokens, row.sampled_tokens) for row in group]
    assert found == [(0, 0, 2, 3), (0, 1, 6, 2)]
    assert group_forks(group) == [group] and decode(encode(TrainingBatch(0, [group]))).groups[0][1].fork == 1


def says_batch(broker):
    for one in (part(0, 2, [5]), part(0, 2, [5]), part(1, 2, [6, 7])):
        broker.says(one.message, wire.Fetch(4), one.arrays)


def tokens(batch):
    return [sample.tokens.tolist() for group in batch.groups for sample in group]


def test_a_part_that_arrives_twice_counts_once(source):
    fetched = in_background(source.fetch, 4)
    says_batch(source.connection)
    assert tokens(fetched.result(30)) == [[9, 5], [9, 6, 7]]


def test_a_batch_is_reported_while_the_next_is_waited_for(source):
    fetched, reported = in_background(source.fetch, 4), in_background(source.consumed, 3, {"loss": 0.5})
    source.connection.says(wire.Accepted(), CONSUMED)
    assert reported.result(30) is None and not fetched.done()
    says_batch(source.connection)
    assert len(fetched.result(30).groups) == 2


def test_all_pending_requests_are_resent_to_a_restarted_broker(source):
    fetched, reported = in_background(source.fetch, 4), in_background(source.consumed, 3, {"loss": 0.5})
    broker = source.connection
    broker.says(part(0, 2, [5]).message, wire.Fetch(4), part(0, 2, [5]).arrays)
    broker.says(wire.Refused("unknown session; say hello"), CONSUMED)
    while broker.heard.count(CONSUMED) < 2 or broker.heard.count(wire.Fetch(4)) < 2:
        time.sleep(0.005)
    broker.says(wire.Accepted(), CONSUMED)
    says_batch(broker)
    assert reported.result(30) is None and len(tokens(fetched.result(30))) == 2
    assert broker.hellos == 2


def test_an_unreachable_broker_fails_pending_and_later_requests(source):
    fetched = in_background(source.fetch, 4)
    source.connection.inbox.put(BrokerUnreachable("silent"))
    with pytest.raises(BrokerUnreachable, match="silent"):
        fetched.result(30)
    with pytest.raises(BrokerUnreachable, match="silent"):
        source.durable(4, 0)
