"""The ledger closes and the staleness bound holds, whatever happens in whatever order."""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from april.broker.ledger import Ledger, Rules, Verdict
from april.broker.samples import GroupState, SampleState
from april.broker.schedule import RoundRules, RoundSchedule
from april.broker.snapshot import COUNTERS, PLAIN, LedgerImage, freeze, thaw
from april.version import Version

RESPONSE_BUDGET = 12


class NumberedPrompts:
    """`rows` prompts, `epochs` times."""

    def __init__(self, rows: int, epochs: int):
        self.rows, self.epochs = rows, epochs

    def draw(self, cursor):
        epoch, row = cursor
        if row >= self.rows:
            epoch, row = epoch + 1, 0
        return None if epoch >= self.epochs else (epoch, row, b"")


class Pipeline(RuleBasedStateMachine):
    """A broker's ledger and schedule between workers that come, go and lag, and a learner that may restart."""

    @initialize(
        batch_groups=st.integers(1, 4),
        group_size=st.integers(2, 3),
        max_staleness=st.integers(0, 3),
        over_sampling=st.floats(0.3, 6),
        partial_rollout=st.booleans(),
        overlap=st.booleans(),
        rows=st.integers(1, 60),
        epochs=st.sampled_from([1, 2, 50]),
        min_group_size=st.sampled_from([None, 1]),
        train_last_batch=st.booleans(),
    )
    def start(
        self,
        batch_groups,
        group_size,
        max_staleness,
        over_sampling,
        partial_rollout,
        overlap,
        rows,
        epochs,
        min_group_size,
        train_last_batch,
    ):
        round_groups = max(1, round(over_sampling * batch_groups))
        overlap = overlap and max_staleness > 0
        self.rules = Rules(
            batch_groups,
            group_size,
            max_staleness,
            max_attempts=3,
            min_group_size=min_group_size,
            max_response_tokens=RESPONSE_BUDGET,
        )
        self.log = []
        self.snapshot = None
        self.ledger = Ledger(self.rules, record=self.journal)
        self.schedule = RoundSchedule(
            RoundRules(batch_groups, round_groups, 1000, partial_rollout, overlap, train_last_batch),
            NumberedPrompts(rows, epochs),
        )
        self.ledger.start_learner(0)
        self.versions = {"w0": Version(0, 0), "w1": Version(0, 0)}
        self.emitted = 0
        self.most_consumed = 0
        self.advance()

    def journal(self, event, arrays):
        self.log.append(event)
        return len(self.log), 1

    def advance(self):
        while self.schedule.advance(self.ledger):
            if self.schedule.finished(self.ledger):
                return

    def a_lease(self, data, generating):
        tokens = [t for t, lease in self.ledger.leases.items() if lease.generating is generating]
        return self.ledger.leases[data.draw(st.sampled_from(sorted(tokens)))] if tokens else None

    # --- workers ---

    @rule(worker=st.sampled_from(["w0", "w1"]), count=st.integers(1, 6))
    def lease(self, worker, count):
        for _ in range(count):
            step = self.versions[worker].step
            sample = (
                self.ledger.queue.take_scoring()
                or self.schedule.urgent_sample(self.ledger, step)
                or self.schedule.next_sample(self.ledger, step)
            )
            if sample is None:
                return
            self.ledger.lease(sample, worker, step, expires_at=0.0)

    @rule(data=st.data(), count=st.integers(1, RESPONSE_BUDGET), ends=st.booleans())
    def generate(self, data, count, ends):
        if lease := self.a_lease(data, generating=True):
            sample, version = lease.sample, self.versions[lease.worker]
            count = min(count, RESPONSE_BUDGET - sample.length)
            finish = "stop" if ends or sample.length + count == RESPONSE_BUDGET else ""
            verdict = self.ledger.add_chunk(lease.token, sample.length, count, version, finish)
            assert verdict is Verdict.OK
            self.emitted += count
            self.advance()

    @rule(data=st.data(), offset=st.integers(-3, 3).filter(bool))
    def chunk_out_of_place(self, data, offset):
        if lease := self.a_lease(data, generating=True):
            start = lease.sample.length + offset
            verdict = self.ledger.add_chunk(lease.token, start, 1, self.versions[lease.worker])
            assert verdict is (Verdict.DUPLICATE if offset < 0 else Verdict.GAP)

    @rule(data=st.data())
    def chunk_of_an_older_version_or_holder(self, data):
        if lease := self.a_lease(data, generating=True):
            length = lease.sample.length
            assert self.ledger.add_chunk(lease.token, length, 1, Version(0, lease.step - 1)) is Verdict.FENCED
            assert self.ledger.add_chunk(lease.token + 100_000, length, 1, Version(9, 999)) is Verdict.FENCED

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def score(self, data, reward):
        if lease := self.a_lease(data, generating=False):
            assert self.ledger.score(lease.token, reward) is Verdict.OK
            assert self.ledger.score(lease.token, reward) is Verdict.FENCED
            self.advance()

    @rule(data=st.data(), generating=st.booleans(), cause=st.sampled_from(["lost", "expired", "generation_failed"]))
    def lose(self, data, generating, cause):
        if lease := self.a_lease(data, generating):
            self.ledger.end_lease(lease.token, cause)
            self.advance()

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def hand_back_what_was_aborted(self, worker):
        for lease in list(self.ledger.leases.values()):
            if lease.worker == worker and lease.generating and lease.token <= self.ledger.watermark:
                self.ledger.end_lease(lease.token, "abort")
        self.advance()

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def load_weights(self, worker):
        if self.ledger.consumed >= self.ledger.frontier:
            self.versions[worker] = Version(self.ledger.branch, self.ledger.consumed)

    @rule(seed=st.integers(0, 2**32), actions=st.integers(20, 200), stragglers=st.floats(0, 0.5))
    def a_busy_while(self, seed, actions, stragglers):
        """Many small things happen; some groups are hardly ever worked on."""
        chance = random.Random(seed)
        for _ in range(actions):
            worker = chance.choice(list(self.versions))
            if chance.random() < 0.2:
                self.load_weights(worker)
            self.hand_back_what_was_aborted(worker)
            self.lease(worker, chance.randrange(4))
            for lease in list(self.ledger.leases.values()):
                slow = random.Random(lease.sample.group.id).random() < stragglers
                if lease.worker != worker or (slow and chance.random() < 0.95) or lease.token not in self.ledger.leases:
                    continue
                sample, version = lease.sample, self.versions[worker]
                if not lease.generating:
                    self.ledger.score(lease.token, 1.0)
                    continue
                count = chance.randint(1, RESPONSE_BUDGET - sample.length)
                ends = sample.length + count == RESPONSE_BUDGET or chance.random() < 0.5
                verdict = self.ledger.add_chunk(lease.token, sample.length, count, version, "stop" if ends else "")
                assert verdict is Verdict.OK
                self.emitted += count
            self.advance()
            if self.ledger.consumed < self.ledger.next_step and chance.random() < 0.7:
                self.consume()
            self.the_bound_holds()

    # --- learner ---

    @precondition(lambda self: self.ledger.consumed < self.ledger.next_step)
    @rule()
    def consume(self):
        step = self.ledger.consumed
        assert self.ledger.consume(step) is Verdict.OK
        assert self.ledger.consume(step) is Verdict.DUPLICATE
        for group in self.ledger.deliveries[step]:
            for sample in group.samples:
                for _, _, version in sample.segments:
                    assert 0 <= step - version.step <= self.rules.max_staleness
        self.advance()

    @rule()
    def checkpoint(self):
        self.ledger.checkpoint(self.ledger.consumed, oldest=self.ledger.durable)

    @rule()
    def restart_learner_from_checkpoint(self):
        before = {step: [g.id for g in groups] for step, groups in self.ledger.deliveries.items()}
        self.ledger.start_learner(self.ledger.durable)
        assert before == {step: [g.id for g in groups] for step, groups in self.ledger.deliveries.items()}

    # --- broker ---

    @rule()
    def take_snapshot(self):
        encoded = msgspec.msgpack.encode(freeze(self.ledger))
        self.snapshot = (len(self.log), msgspec.msgpack.decode(encoded, type=LedgerImage))

    @rule(from_snapshot=st.booleans())
    def restart_broker(self, from_snapshot):
        """What snapshot and journal rebuild is what was there."""
        again = Ledger(self.rules, record=self.journal)
        first = 0
        if from_snapshot and self.snapshot:
            first, image = self.snapshot
            thaw(image, again)
        for reference, event in enumerate(self.log[first:], start=first + 1):
            again.apply(event, (reference, 1))
        assert freeze(again) == freeze(self.ledger)
        for derived in ("held", "load"):
            assert getattr(again, derived) == getattr(self.ledger, derived)
        assert again.bound.__dict__ == self.ledger.bound.__dict__
        assert sorted(again.leases) == sorted(self.ledger.leases)
        self.ledger = again
        self.schedule.exhausted = False

    # --- what never breaks ---

    @invariant()
    def the_frontier_never_recedes(self):
        if hasattr(self, "ledger"):
            self.most_consumed = max(self.most_consumed, self.ledger.consumed)
            assert self.ledger.frontier == self.most_consumed

    @invariant()
    def the_ledger_closes(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.closed
        assert self.ledger.tokens["generated"] == self.emitted
        training = [group for group in self.ledger.groups.values() if not group.evaluation]
        for state in (GroupState.OPEN, GroupState.READY, GroupState.DELIVERED):
            members = [group for group in training if group.state is state]
            kept = [s for group in members for s in (group.samples if state == "open" else group.live_samples)]
            assert self.ledger.tokens[state] == sum(sample.length for sample in kept)
            assert self.ledger.counts[state] == len(members)

    @invariant()
    def the_load_is_what_workers_generate(self):
        if hasattr(self, "ledger"):
            assert self.ledger.generating == sum(lease.generating for lease in self.ledger.leases.values())

    @invariant()
    def the_bound_holds(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.bound.holds(self.ledger.next_step)
        next_step, rules = self.ledger.next_step, self.rules
        deadlines = [
            group.opened_at + rules.max_staleness
            for group in self.ledger.groups.values()
            if group.state in (GroupState.OPEN, GroupState.READY)
        ]
        for last in range(next_step - 1, next_step + rules.max_staleness + 2):
            due = sum(deadline <= last for deadline in deadlines)
            assert due <= (last - next_step + 1) * rules.batch_groups

    @invariant()
    def segments_tile_the_response_and_versions_never_decrease(self):
        if not hasattr(self, "ledger"):
            return
        for group in self.ledger.groups.values():
            for sample in group.samples:
                end = 0
                for start, stop, version in sample.segments:
                    assert start == end < stop
                    assert version.step >= group.opened_at
                    end = stop
                assert end == sample.length
                steps = [version.step for _, _, version in sample.segments]
                assert steps == sorted(steps)
                assert sample.state is not SampleState.PARTIAL or sample.length > 0

    @invariant()
    def no_prompt_is_drawn_twice_or_skipped(self):
        if not hasattr(self, "ledger"):
            return
        drawn = [(e.epoch, e.row) for e in self.log if type(e).__name__ == "GroupOpened"]
        rows = self.schedule.prompts.rows
        assert drawn == [(i // rows, i % rows) for i in range(len(drawn))]


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_snapshot_leaves_nothing_of_the_ledger_out():
    """Whoever gives the ledger a new attribute decides here whether a snapshot holds it or it follows from the rest."""
    held = {*PLAIN, *COUNTERS, "header", "groups", "ready", "deliveries", "evaluations", "cohorts"}
    follows = {"rules", "record", "leases", "held", "load", "queue", "bound", "voided"}
    assert set(vars(Ledger(Rules(1, 1, 0)))) == held | follows


@pytest.mark.parametrize("kind", ["sync", "april", "steps", "overlap", "no_partial"])
def test_a_run_without_faults_comes_to_its_end(kind):
    """Every schedule delivers all batches when workers and learner simply do their work."""
    batch, round_groups = 4, {"april": 8, "steps": 3, "overlap": 8, "no_partial": 8}.get(kind, 4)
    rules = RoundRules(batch, round_groups, 10, kind != "no_partial", kind == "overlap")
    ledger = Ledger(Rules(batch, 2, 5))
    schedule = RoundSchedule(rules, NumberedPrompts(1000, 1))
    ledger.start_learner(0)
    busy = {}
    while ledger.consumed < 10:
        ended = schedule.advance(ledger)
        if ended:
            for token in list(busy):
                ledger.end_lease(token, "abort")
            busy.clear()
        version = Version(0, ledger.consumed)
        while len(busy) < 6 and (sample := schedule.next_sample(ledger, version.step)):
            lease = ledger.lease(sample, "w", version.step, 0.0)
            busy[lease.token] = 1 + (sample.group.id * 7 + sample.index * 3) % 11 * 3
        for token in list(busy):
            sample = ledger.leases[token].sample
            done = sample.length + 1 >= busy[token]
            assert ledger.add_chunk(token, sample.length, 1, version, "stop" if done else "") is Verdict.OK
            if done:
                ledger.score(token, 1.0)
                del busy[token]
        if ledger.consumed < ledger.next_step:
            ledger.consume(ledger.consumed)
    assert ledger.closed
    assert sum(len(groups) for groups in ledger.deliveries.values()) == 10 * batch
    discarded = ledger.discarded["aborted"]
    assert (discarded > 0) == (kind == "no_partial")
    if kind in ("sync", "steps"):
        assert ledger.counts[GroupState.OPEN] == 0
