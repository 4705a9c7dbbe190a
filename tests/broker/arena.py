"""A run for the message fuzzer: a real broker service and journal, with workers, a scorer, a learner and a monitor that
follow the protocol."""

from collections import Counter, deque

import numpy as np

from april import wire
from april.broker.ledger.samples import SampleState
from april.wire.message import Version
from tests.broker.hostile import encode
from tests.support.broker_conversation import (
    Conversation,
    FakeAgents,
    FakeLearner,
    FakeScorer,
    FakeWorker,
    Peer,
    chunk_arrays,
    granted,
    observation,
)

WORK = (wire.Grants, wire.AgentSessionList, wire.SessionTurns)
"""Message types that stay in a peer's inbox until the peer handles them; other messages are dropped after each
round."""


class Arena(Conversation):
    """A run that makes progress, and keeps recent valid messages of its peers for the attacker to reuse."""

    def __init__(self, config, chance):
        self.chance = chance
        self.sent = deque(maxlen=500)
        """(route, frames) of recent valid messages."""
        self.sent_arrays = deque(maxlen=100)
        """(route, frames) of recent valid messages that carry arrays."""
        self.said = set()
        """Names of the message types that peers have sent."""
        self.ended = deque([1], maxlen=100)
        """Ids of leases that have ended."""
        self.events = 0
        """Number of events that the ledger has recorded."""
        super().__init__(config)
        self.workers = [Worker(self, name) for name in ("w0", "w1")]
        self.scorer = Scorer(self, "s0")
        self.agents = Agents(self, "a0") if config.agent.is_set else None
        self.holders = [self.scorer, *self.workers, *([self.agents] if self.agents else [])]
        self.learner = Learner(self)
        self.monitor = Monitor(self, "monitor", "monitor")
        self.everyone = [*self.holders, self.learner, self.monitor]
        for holder in self.holders:
            holder.join()
        self.learner.join()
        self.monitor.hello()
        self.progress()

    def start(self):
        super().start()
        record = self.ledger.write

        def count(event, *arrays):
            self.events += 1
            return record(event, *arrays)

        self.ledger.write = count

    def progress(self):
        """Let every peer do some work: report tokens, score, train a step, ask for the status."""
        self.tick(0.05)
        for holder in self.holders:
            holder.work()
        self.learner.train()
        self.monitor.say(wire.StatusRequest())
        for peer in self.everyone:
            peer.inbox = [received for received in peer.inbox if isinstance(received.message, WORK)]

    def leases_of(self, holder):
        return [lease_id for lease_id, lease in self.ledger.leases.items() if lease.worker == holder.uid]

    def a_lease_of(self, holder):
        return next(iter(self.leases_of(holder)), 1)


class Remembered(Peer):
    def say(self, message, arrays=(), connection=b"data"):
        route = self.name.encode() + b"/" + connection
        sent = route, encode(message, arrays, self.session)
        self.conversation.sent.append(sent)
        self.conversation.said.add(type(message).__name__)
        if arrays:
            self.conversation.sent_arrays.append(sent)
        super().say(message, arrays, connection)


class Holder(Remembered):
    def __init__(self, arena, name):
        super().__init__(arena, name)
        self.received_bytes = 0
        self.held = {}
        """(grant, reported length in tokens) by lease id."""
        self.rows, self.closings = [], []
        """Rows and closings of the holder's next report."""

    def work(self):
        arena, chance = self.conversation, self.conversation.chance
        for received in self.take(wire.Grants):
            self.received_bytes += received.array_bytes
            for grant in granted(received):
                self.held[grant.lease_id] = (grant, sum(len(piece) for piece in grant.arrays[1:]))
        for lease_id in [lease_id for lease_id in self.held if lease_id not in arena.ledger.leases]:
            arena.ended.append(lease_id)
            del self.held[lease_id]
        self.say(wire.Heartbeat(list(self.held), 0, self.received_bytes), connection=b"control")
        if chance.random() < 0.2:
            self.say_room(chance.choice([2, 3, 6, 2**53]))
        for grant, length in chance.sample(list(self.held.values()), min(4, len(self.held))):
            self.go_on(grant, length, chance)
        if self.rows or self.closings:
            self.report(self.rows, self.closings)
        self.rows, self.closings = [], []

    def judge(self, grant, chance):
        if chance.random() < 0.05:
            self.closings.append(wire.GiveBack(grant.lease_id, 0, "scoring_failed", "tired"))
        else:
            rewards = [chance.random() for _ in grant.group_scored or [0]]
            self.closings.append(wire.Scored(grant.lease_id, rewards, [{"right": 1.0}] * len(rewards)))


class Worker(Holder, FakeWorker):
    def say_room(self, capacity):
        self.hold(self.conversation.ledger.steps.consumed, capacity)
        self.say(wire.ActivitySpan("generate", 0.0, 1.0))
        self.say(wire.WeightFolderRefused(self.version, "a file is torn"))

    def work(self):
        if self.version.step != self.conversation.ledger.steps.consumed:
            self.say_room(6)
        super().work()

    def go_on(self, grant, length, chance):
        if grant.scoring:
            self.judge(grant, chance)
        elif grant.lease_id <= self.conversation.ledger.rounds.watermark and not grant.evaluation:
            self.closings.append(wire.GiveBack(grant.lease_id, length, "abort"))
        elif chance.random() < 0.5 and grant.max_new_tokens > length + 3:
            self.rows.append(self.new_tokens(grant, length, 2))
            self.held[grant.lease_id] = (grant, length + 2)
            if self.conversation.config.environment.name:
                self.rows.append(observation(grant.lease_id, length + 2, chunk_arrays(length + 2, 1)[0], b"state"))
                self.held[grant.lease_id] = (grant, length + 3)
        elif chance.random() < 0.05:
            cause = chance.choice(["leave", "generation_failed"])
            self.closings.append(wire.GiveBack(grant.lease_id, length, cause, "tired"))
        else:
            self.rows.append(self.new_tokens(grant, length, 1, "stop"))
            if not grant.hand_over:
                self.judge(grant, chance)


class Scorer(Holder, FakeScorer):
    def say_room(self, capacity):
        self.say(wire.HolderCapacity(capacity))

    def go_on(self, grant, length, chance):
        self.judge(grant, chance)


class Agents(Remembered, FakeAgents):
    def work(self):
        arena, chance = self.conversation, self.conversation.chance
        self.listen()
        for lease_id in [lease_id for lease_id in self.sessions if lease_id not in arena.ledger.leases]:
            arena.ended.append(lease_id)
            del self.sessions[lease_id]
        self.say(wire.Heartbeat(list(self.sessions), 0, self.received_bytes), connection=b"control")
        if chance.random() < 0.2:
            self.say(wire.HolderCapacity(chance.choice([2, 6, 40]), "http://127.0.0.1:1/v1"))
            self.say(wire.HolderRequest(chance.choice([0, 1, 2**50]), chance.choice([0, 1, 2**50]), 2**50))
            self.say(wire.KeepImage("0" * 64, 0, 4), [np.zeros(chance.choice([2, 4]), np.uint8)])
        for told in chance.sample(list(self.sessions.values()), min(6, len(self.sessions))):
            sample = arena.ledger.leases[told.lease_id].sample
            if sample.state is SampleState.ACTING and sample.length + 8 < told.max_tokens and chance.random() < 0.7:
                self.say_to_policy(told.lease_id, sample.length, 1)
            elif sample.complete_turns_length:
                closings = [wire.Scored(told.lease_id, [chance.random()], [{}]), wire.Closed(told.lease_id)]
                self.report(closings=[chance.choice(closings)])
            elif chance.random() < 0.05:
                self.report(closings=[wire.GiveBack(told.lease_id, 0, "agent_failed", "tired")])


class Learner(Remembered, FakeLearner):
    def train(self):
        ledger = self.conversation.ledger
        step, brought = ledger.steps.consumed, ledger.prompts.submitted_count
        self.say(wire.Heartbeat([], 0, self.received_bytes), connection=b"control")
        if ledger.rules.submitted and brought - ledger.prompts.next[1] < 16:
            self.say(wire.Submit(brought, [wire.Submission(1, "0", "", b"extra")] * 16), [np.full(16, 5, np.int32)])
        self.say(wire.FetchImages(["0" * 64]))
        self.say(wire.Fetch(step))
        for batch in self.take(wire.Batch):
            self.received_bytes += batch.array_bytes
            self.say(wire.Consumed(step, {"loss": 0.5}))
            self.say(wire.Durable(step + 1, step))
            self.say(wire.BestRequest())
            version = Version(ledger.learner.incarnation, step + 1)
            self.say(wire.WeightsWritten(wire.WeightFolder(version, "0" * 64)))


class Monitor(Remembered):
    pass


def digest(ledger):
    """State of the ledger, for comparison, without the expiry times of leases, which a renewal may change."""
    groups = [
        (
            group.id, group.state, group.tokens, group.step, group.started, group.opened_at,
            [
                (s.state, s.length, s.lease_id, s.attempts, s.reward, s.last_error, s.finish_reason, repr(s.segments))
                for s in group.samples
            ],
        )
        for group in ledger.groups.values()
    ]  # fmt: skip
    leases = [(lease.id, lease.worker, lease.step, lease.scoring) for lease in ledger.leases.values()]
    plain = {
        name: repr(value) for name, value in vars(ledger).items() if isinstance(value, int | str | tuple | Counter)
    }
    return groups, leases, plain, {step: [g.id for g in made] for step, made in ledger.deliveries.items()}
