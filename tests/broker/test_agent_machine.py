"""Agents' sessions in the ledger under random orders of events: each token is counted once, and none is lost."""

import random
from collections import Counter
from itertools import accumulate

import pytest

from april.broker.conformance.runs import NumberedPrompts, advance
from april.broker.journal.snapshot import freeze, live_images, thaw
from april.broker.ledger.admission import Verdict
from april.broker.ledger.commands import score_tokens
from april.broker.ledger.events import RowsAccepted, SessionLost
from april.broker.ledger.ledger import Ledger, LedgerError
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import NOT_EVALUATED, SampleState, needs_agent
from april.broker.plan import make_schedule
from april.broker.schedules.schedule import choose_sample
from april.config import ScheduleSection
from april.wire.message import Version
from april.wire.rows import observation_row, pack_rows
from tests.support.marks import full

BUDGET = 40
SEEDS = [0, 1, full(2), full(3)]


class World:
    """Two workers, two agents processes and a learner that act at random."""

    def __init__(self, seed, kind):
        self.chance = random.Random(seed)
        self.log = []
        least = 1 if seed % 2 else None
        self.rules = Rules(2, 2, 2, max_attempts=4, min_group_size=least, max_response_tokens=BUDGET, agents=True)
        self.ledger = Ledger(self.rules, write=self.journal)
        section = ScheduleSection(
            kind=kind, rollout_batch_size=2, n_samples_per_prompt=2, max_staleness=2, max_steps=40
        )
        self.schedule = make_schedule(section, NumberedPrompts(30, 50))
        self.ledger.start_learner(0)
        self.steps = {"w0": 0, "w1": 0}
        self.acknowledged = Counter()
        """Number of sampled tokens that the ledger has accepted, by whether they are of evaluation."""
        self.shown = {}
        """Names of the images in each agent's request, by its journal record."""

    def journal(self, event, arrays):
        self.log.append(event)
        if isinstance(event, RowsAccepted):
            assert {lease_id for lease_id, _ in event.images} <= {row.lease_id for row in event.rows}
            self.shown[len(self.log)] = [name for _, names in event.images for name in names]
        return len(self.log), 100

    def a_lease(self, fits):
        return self.chance.choice([lease for lease in self.ledger.leases.values() if fits(lease)] or [None])

    # --- what happens ---

    def open_session(self):
        if sample := self.schedule.next_for_agent(self.ledger) or self.ledger.queue.take_for_agent(True):
            self.ledger.lease_agent(sample, self.chance.choice(["a0", "a1"]), 0.0)

    def speak(self):
        """Send an agent's request: accepted if the session waits for its agent and has budget left, refused
        otherwise."""
        if lease := self.a_lease(lambda lease: lease.agent):
            fork, count = self.chance.choice(lease.sample.with_forks), self.chance.randint(1, 3)
            row = observation_row(lease.id + fork.fork_number, fork.length, count, "", b"request")
            may = fork.state is SampleState.ACTING and fork.length + count < BUDGET
            self.request(row, may)

    def branch_off(self):
        """Fork a session: accepted at its beginning and where a turn has ended, refused elsewhere."""
        if lease := self.a_lease(lambda lease: lease.agent and self.chance.random() < 0.5):
            session, number = lease.sample, 1 + max(fork.fork_number for fork in lease.sample.with_forks)
            parent = self.chance.choice(session.with_forks)
            ends = {
                0,
                *(start for start, _ in parent.observations),
                *({parent.length} if parent.state is SampleState.ACTING else ()),
            }
            start, count = self.chance.choice([*ends, self.chance.randrange(BUDGET)]), self.chance.randint(1, 3)
            row = observation_row(lease.id + number, start, count, "", b"request", parent=parent.fork_number)
            if self.request(row, start in ends and start + count < BUDGET):
                ends = accumulate(ref.tokens for ref in parent.chunk_refs)
                shared = [ref.record for ref, end in zip(parent.chunk_refs, ends, strict=True) if end <= start]
                found = [ref.record for ref in session.find_fork(number).chunk_refs]
                assert found[: len(shared)] == shared, "what is shared is stored once"

    def request(self, row, is_permitted):
        """Send an agent's request, which may show images; returns whether it is accepted, as it should be."""
        names = [f"image {len(self.log)}.{number}" for number in range(self.chance.choice([0, 0, 1, 2]))]
        [verdict] = self.ledger.add_chunks(pack_rows([row]), b"request", images={0: names} if names else {})
        assert verdict is (Verdict.OK if is_permitted else Verdict.INVALID)
        assert not is_permitted or self.shown[len(self.log)] == names
        return is_permitted

    def generate(self):
        worker = self.chance.choice(list(self.steps))
        if sample := choose_sample(self.schedule, self.ledger, Version(0, self.steps[worker])):
            self.ledger.lease(sample, worker, self.steps[worker], 0.0)
        if lease := self.a_lease(lambda lease: lease.generating and lease.worker == worker):
            sample = lease.sample
            count = min(self.chance.randint(1, 5), BUDGET - sample.length)
            ends = self.chance.random() < 0.5 or sample.length + count == BUDGET
            before = sample.length
            version = Version(self.ledger.learner.incarnation, self.steps[worker])
            verdict = self.ledger.add_chunk(lease.id, before, count, version, "stop" if ends else "")
            assert verdict is Verdict.OK
            self.acknowledged[sample.group.evaluation] += count
            assert sample.state is (SampleState.ACTING if ends else SampleState.LEASED)

    def close(self):
        if lease := self.a_lease(lambda lease: lease.agent and self.chance.random() < 0.3):
            sample, complete = lease.sample, lease.sample.complete_turns_length
            behind = [(fork.fork_number, self.chance.randrange(BUDGET)) for fork in sample.forks]
            if self.chance.random() < 0.5:
                verdict = self.ledger.score(lease.id, self.chance.random(), superseded=behind)
            else:
                said = self.chance.choice([None, (0.5, {})])
                verdict = self.ledger.close_agent(lease.id, behind, b"left", said)
            if complete:
                assert verdict is Verdict.OK and sample.length == complete, "it ends with a complete turn"
            if verdict is Verdict.OK:
                assert all(fork.length == fork.sampled_until for fork in sample.with_forks)
                assert all(fork.length <= dict(behind)[fork.fork_number] for fork in sample.forks)

    def score(self):
        if lease := self.a_lease(lambda lease: lease.scoring):
            session, said = lease.sample, lease.sample.reward
            columns = [{"teacher": fork.length - fork.sampled_from} for fork in session.sampled_forks]
            if not session.group.evaluation:
                score_tokens(self.ledger, lease.id, columns, b"", [])
            assert self.ledger.score(lease.id, 1.0) is Verdict.OK
            assert session.reward == (1.0 if said is None else 0.5), "what the agent has said stands"

    def lose(self):
        if lease := self.a_lease(lambda lease: self.chance.random() < 0.2):
            cause = "agent_failed" if lease.agent and self.chance.random() < 0.3 else "lost"
            length, state = lease.sample.length, lease.sample.state
            self.ledger.end_lease(lease.id, cause)
            if lease.agent and cause == "lost" and lease.sample.state is not SampleState.DEAD:
                assert (lease.sample.length, lease.sample.state) == (length, state), "a turn goes on without its agent"

    def forsake(self):
        """Give up a session whose agent was lost: its sample is dead. A session without any request cannot be given up,
        and stays as it was."""
        groups = [group for group in self.ledger.groups.values() if group.state == "open"]
        lost = [sample for group in groups for sample in group.samples if needs_agent(sample)]
        if lost and self.chance.random() < 0.3:
            sample = self.chance.choice(lost)
            attempts, letters = sample.attempts, self.ledger.dead_letters.total
            if not (sample.length or sample.forks):
                with pytest.raises(LedgerError):
                    self.ledger.lose_session(sample)
                return
            self.ledger.lose_session(sample)
            assert (sample.state, sample.attempts, sample.reward) == (SampleState.DEAD, attempts, None)
            assert not (sample.lease_id or sample.agent_lease) and self.ledger.dead_letters.total == letters

    def abort(self):
        for lease in list(self.ledger.leases.values()):
            if self.ledger.is_aborted(lease.id):
                assert not lease.agent
                self.ledger.end_lease(lease.id, "abort")

    def evaluate(self):
        if self.chance.random() < 0.1 and not self.ledger.evaluations:
            self.ledger.open_group(0, 0, floor=self.ledger.steps.consumed, evaluation=True, size=2)
        for step, groups in list(self.ledger.evaluations.items()):
            for group in groups if min(self.steps.values()) > step else ():
                if group.state == "open" and group.unfinished:
                    self.ledger.discard(group, NOT_EVALUATED)
            if all(group.state != "open" for group in groups):
                self.ledger.record_evaluation(step, {})

    def learn(self):
        if self.ledger.steps.consumed < self.ledger.steps.next:
            batch = self.ledger.deliveries[self.ledger.steps.consumed]
            assert all(s.reward is not None for g in batch for s in g.samples if s.state is SampleState.DONE)
            self.ledger.consume(self.ledger.steps.consumed)
        for worker in self.steps:
            if self.chance.random() < 0.5 and self.steps[worker] < self.ledger.steps.consumed:
                for lease in list(self.ledger.leases.values()):
                    if lease.worker == worker and lease.generating and lease.sample.group.evaluation:
                        self.ledger.end_lease(lease.id, "recall")
                self.steps[worker] = self.ledger.steps.consumed

    # --- what holds ---

    def check(self):
        ledger = self.ledger
        assert ledger.account.closed and ledger.account.tokens["generated"] == self.acknowledged[False]
        assert ledger.bound.holds(ledger.steps.next)
        for lease in ledger.leases.values():
            sample = lease.sample
            assert (sample.agent_lease if lease.agent else sample.lease_id) == lease.id
        for evaluation in (False, True):
            groups = [
                group for group in ledger.groups.values() if group.evaluation == evaluation and group.state == "open"
            ]
            states = Counter(str(fork.state) for group in groups for fork in group.samples_with_forks)
            assert ledger.open_samples.by_state(evaluation) == states
        for group in ledger.open_groups():
            assert group.tokens == sum(sample.sampled_tokens for sample in group.samples)
            for fork in group.samples_with_forks:
                steps = [ref.step for ref in fork.chunk_refs if ref.step or not ref.observed]
                assert steps == sorted(steps), "versions never decrease along a path"
                assert fork.last_step == max(steps, default=0)
                assert list(fork.images) == self.images_in(fork), "those of its requests, and of the tokens it shares"
                assert fork.shared_tokens <= fork.length and all(
                    start >= fork.shared_tokens for start, *_ in fork.segments
                )
        assert ledger.leases.generating == sum(
            lease.generating and not lease.sample.group.evaluation for lease in ledger.leases.values()
        )

    def images_in(self, fork):
        """(name, offset of the request) of the images in a fork, by the requests among its tokens."""
        starts = accumulate((ref.tokens for ref in fork.chunk_refs), initial=0)
        requests = [(start, self.shown[ref.record]) for start, ref in zip(starts, fork.chunk_refs, strict=False)]
        return [(name, start) for start, names in requests for name in names]

    def rebuilt(self):
        """A new ledger, rebuilt from the journal alone."""
        again = Ledger(self.rules)
        for position, event in enumerate(self.log):
            again.apply(event, (position + 1, 100))
        return again


@pytest.mark.parametrize("kind", ["april", "sync", "continuous"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_ledger_closes_and_a_journal_or_a_snapshot_rebuilds_it(kind, seed):
    world = World(seed, kind)
    happenings = [
        world.open_session, world.speak, world.speak, world.branch_off, world.generate, world.generate, world.close,
        world.score, world.lose, world.forsake, world.abort, world.evaluate, world.learn,
    ]  # fmt: skip
    for _ in range(2000):
        world.chance.choice(happenings)()
        advance(world.schedule, world.ledger)
        world.check()
    assert freeze(world.rebuilt()) == freeze(world.ledger)
    thawed = Ledger(world.rules)
    thaw(freeze(world.ledger), thawed)
    assert freeze(thawed) == freeze(world.ledger)
    assert set(live_images(thawed)) == set(live_images(world.ledger)) != set()
    assert sorted(map(repr, taken(thawed))) == sorted(map(repr, taken(world.ledger))), "the same sessions lack an agent"
    assert world.ledger.steps.consumed > 1, "a world in which nothing is trained shows nothing"
    assert any(isinstance(event, SessionLost) for event in world.log)


def taken(ledger):
    """Take all samples without a running agent from the queue; returns their (group, index)."""
    found = []
    for evaluation in (False, True):
        while sample := ledger.queue.take_for_agent(evaluation):
            found.append((sample.group.id, sample.index))
    return set(found)
