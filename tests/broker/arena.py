"""A run under fire: a real service and journal, with workers, a learner and a monitor that behave."""

from collections import Counter, deque

import numpy as np

from april import wire
from tests.broker.conversation import Conversation, FakeLearner, FakeWorker, Peer
from tests.broker.hostile import encode


class Arena(Conversation):
    """A run that makes progress, with everything its peers have said lately."""

    def __init__(self, config, chance):
        self.chance = chance
        self.sent = deque(maxlen=500)
        """(route, frames) of valid messages"""
        self.ended = deque([1], maxlen=100)
        """tokens of leases that are over"""
        self.events = 0
        """facts recorded"""
        super().__init__(config)
        self.workers = [Worker(self, name) for name in ("w0", "w1")]
        self.learner = Learner(self)
        self.monitor = Monitor(self, "monitor", "monitor")
        self.everyone = [*self.workers, self.learner, self.monitor]
        for worker in self.workers:
            worker.join()
        self.learner.join()
        self.monitor.hello()
        self.progress()

    def start(self):
        super().start()
        record = self.ledger.record

        def count(event, *arrays):
            self.events += 1
            return record(event, *arrays)

        self.ledger.record = count

    def progress(self):
        """Everybody does some of what is theirs."""
        self.tick(0.05)
        for worker in self.workers:
            worker.work()
        self.learner.train()
        self.monitor.say(wire.StatusRequest())
        for peer in self.everyone:
            peer.inbox = peer.take(wire.Grant)

    def leases_of(self, worker):
        return [token for token, lease in self.ledger.leases.items() if lease.worker == worker.uid]

    def a_lease_of(self, worker):
        return next(iter(self.leases_of(worker)), 1)

    def chunk_frames(self, worker):
        chunk = wire.Chunk(self.a_lease_of(worker), 0, worker.version)
        return encode(chunk, [np.ones(3, "i4"), np.full(3, -1.0, "f4")], worker.session)


class Remembered(Peer):
    def say(self, message, arrays=(), connection=b"data"):
        route = self.name.encode() + b"/" + connection
        self.conversation.sent.append((route, encode(message, arrays, self.session)))
        super().say(message, arrays, connection)


class Worker(Remembered, FakeWorker):
    def __init__(self, arena, name):
        super().__init__(arena, name)
        self.received_bytes = 0
        self.held = {}
        """grant and acknowledged length by token"""

    def work(self):
        arena, chance = self.conversation, self.conversation.chance
        for received in self.take(wire.Grant):
            self.received_bytes += received.array_bytes
            self.held[received.message.token] = (received.message, sum(len(piece) for piece in received.arrays[1:]))
        for token in [token for token in self.held if token not in arena.ledger.leases]:
            arena.ended.append(token)
            del self.held[token]
        self.say(wire.Heartbeat(list(self.held), 0, self.received_bytes), connection=b"control")
        step = arena.ledger.consumed
        if chance.random() < 0.2 or self.version.step != step:
            self.hold(step, capacity=chance.choice([2, 3, 6, 2**53]))
        for grant, length in chance.sample(list(self.held.values()), min(4, len(self.held))):
            self.go_on(grant, length, chance)

    def go_on(self, grant, length, chance):
        if grant.token <= self.conversation.ledger.watermark and not grant.evaluation and not grant.scoring:
            self.say(wire.GiveBack(grant.token, length, "abort"))
        elif grant.scoring:
            self.say(wire.Scored(grant.token, 1.0))
        elif chance.random() < 0.5 and grant.max_new_tokens > length + 3:
            self.chunk(grant, length, 2)
            self.held[grant.token] = (grant, length + 2)
        elif chance.random() < 0.05:
            self.say(wire.GiveBack(grant.token, length, chance.choice(["leave", "generation_failed"]), "tired"))
        else:
            self.chunk(grant, length, 1, "stop")
            self.say(wire.Scored(grant.token, chance.random()))


class Learner(Remembered, FakeLearner):
    def train(self):
        step = self.conversation.ledger.consumed
        self.say(wire.Heartbeat([], 0, self.received_bytes), connection=b"control")
        self.say(wire.Fetch(step))
        for batch in self.take(wire.Batch):
            self.received_bytes += batch.array_bytes
            self.say(wire.Consumed(step, {"loss": 0.5}))
            self.say(wire.Durable(step + 1, step))


class Monitor(Remembered):
    pass


def digest(ledger):
    """Everything the ledger knows, but for when leases end, which a renewal may change."""
    groups = [
        (
            group.id, group.state, group.tokens, group.step, group.started, group.opened_at,
            [
                (s.state, s.length, s.token, s.attempts, s.reward, s.last_error, s.finish_reason, repr(s.segments))
                for s in group.samples
            ],
        )
        for group in ledger.groups.values()
    ]  # fmt: skip
    leases = [(lease.token, lease.worker, lease.step, lease.scoring) for lease in ledger.leases.values()]
    plain = {
        name: repr(value) for name, value in vars(ledger).items() if isinstance(value, int | str | tuple | Counter)
    }
    return groups, leases, plain, {step: [g.id for g in made] for step, made in ledger.deliveries.items()}
