"""A broker under fire: `python -m tests.broker.fuzz --messages 1000000 [--seed 0]`.

A real service with a real journal serves workers, a learner and a monitor that behave; in between, it is sent what
no peer should send (tests/broker/hostile.py). Nothing of that may raise, be recorded, or change the ledger; what is
refused is answered once and counted once, by a handful of causes; memory stays as it is.
"""

import argparse
import logging
import random
import resource
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np
import orjson

from april import config as configuration
from april import limits, wire
from tests.broker.conversation import Conversation, FakeLearner, FakeWorker, Peer
from tests.broker.hostile import Attacker, encode

BATCH = 200
"""attacks between two turns of the run and two comparisons of the ledger"""
MOST_CAUSES = 40
MAX_SESSIONS = 64
SETTINGS = [
    "--schedule.max_steps",
    "1000000000",
    "--security.max_sessions",
    str(MAX_SESSIONS),
    "--evaluation.prompts",
    "1",
]


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

        def count(event):
            self.events += 1
            return record(event)

        self.ledger.record = count

    def deliver(self):
        known = (message for message in self.service.sessions.outgoing if message.route.split(b"/")[0] in self.peers)
        self.service.sessions.outgoing = list(known)
        super().deliver()

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
        self.held = {}
        """grant and acknowledged length by token"""

    def work(self):
        arena, chance = self.conversation, self.conversation.chance
        for received in self.take(wire.Grant):
            length = len(received.arrays[0]) - received.message.prompt_tokens
            self.held[received.message.token] = (received.message, length)
        for token in [token for token in self.held if token not in arena.ledger.leases]:
            arena.ended.append(token)
            del self.held[token]
        self.say(wire.Heartbeat(list(self.held), 0), connection=b"control")
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
        if self.fetch(step) is None:
            self.say(wire.Heartbeat(), connection=b"control")
            return
        self.say(wire.Consumed(step, {"loss": 0.5}))
        self.say(wire.Durable(step + 1))


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


def fuzz(config, messages, seed=0, report=lambda done: None):
    """Send that many attacks; returns what was refused by cause. Raises AssertionError with the first failure."""
    chance = random.Random(seed)
    arena = Arena(config, chance)
    attacker, sessions = Attacker(arena, chance), arena.service.sessions
    for done in range(0, messages, BATCH):
        before = digest(arena.ledger)
        for _ in range(min(BATCH, messages - done)):
            fire(arena, *attacker.attack())
        assert digest(arena.ledger) == before, "the ledger has changed"
        arena.progress()
        assert arena.ledger.closed and not arena.service.over, arena.service.over
        assert len(sessions.refusals) <= MOST_CAUSES, sessions.refusals
        assert len(sessions.by_id) <= MAX_SESSIONS and len(sessions.tallies) <= limits.TALLIES
        report(done + BATCH)
    assert arena.ledger.consumed > messages // 10_000, "the run has to go on meanwhile"
    arena.journal.close()
    return sessions.refusals


def fire(arena, route, frames, peer, answer):
    sessions = arena.service.sessions
    counted, recorded, queued = sessions.refusals.total(), arena.events, len(sessions.outgoing)
    arena.service.handle(route, frames, arena.now, peer)
    answers = [message.message for message in sessions.outgoing[queued:]]
    refusals = sum(isinstance(message, wire.Refused) for message in answers)
    assert arena.events == recorded, (route, frames, answers)
    assert sessions.refusals.total() - counted == refusals, (route, frames, answers)
    assert refusals == 1 if answer == "refused" else refusals <= 1, (route, frames, answers)


# --- the command ------------------------------------------------------------------------------------------------


def make_config(folder):
    """A run on a policy that nobody has trained, and prompts for it."""
    from april.policy.model import build_model, save_policy
    from tests.conftest import write_config

    save_policy(build_model(hidden_size=64, layers=1, seed=0), folder / "policy")
    rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row % 2)} for row in range(64)]
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return configuration.load(write_config(folder, folder / "policy", folder), SETTINGS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="[default 1000000]")
    parser.add_argument("--seed", type=int, default=0, help="[default 0]")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sizes, began = [], time.perf_counter()

    def report(done):
        if done % max(BATCH, options.messages // 20 // BATCH * BATCH) == 0:
            sizes.append(resident_mib())
            print(f"{done:>9} messages, {time.perf_counter() - began:6.0f} s, {sizes[-1]:.0f} MiB", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        refusals = fuzz(make_config(Path(folder)), options.messages, options.seed, report)
    for cause, count in refusals.most_common():
        print(f"{count:>9} {cause}")
    print(f"{refusals.total():>9} refused of {options.messages}, nothing raised, nothing recorded")
    return 0


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
