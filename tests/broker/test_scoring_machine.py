"""Random faults of scorers: no response is generated again, and a group is scored as a whole or not at all."""

import dataclasses

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.admission import Verdict
from april.broker.ledger.events import GroupOpened, GroupScored, Leased, RowsAccepted, SampleScored
from april.broker.ledger.ledger import Ledger, LedgerError, Rules
from april.broker.ledger.samples import GroupState, SampleState
from april.wire.message import Version

BUDGET = 6
LOSSES = ["lost", "expired", "scoring_failed", "leave"]


class Scoring(RuleBasedStateMachine):
    """A ledger between workers and scorers; every second group is scored as a whole."""

    @initialize(
        apart=st.booleans(),
        size=st.integers(1, 3),
        min_group_size=st.sampled_from([None, 1]),
        attempts=st.integers(1, 4),
    )
    def start(self, apart, size, min_group_size, attempts):
        self.rules = Rules(
            2, size, 1000, max_attempts=attempts, min_group_size=min_group_size, max_response_tokens=BUDGET,
            scored_apart=apart,
        )  # fmt: skip
        self.log = []
        self.snapshot = None
        self.ledger = self.new_ledger()
        self.ledger.start_learner(0)
        self.emitted = 0

    def new_ledger(self):
        return Ledger(self.rules, write=self.journal, group_scored=lambda evaluation, epoch, row: row % 2 == 1)

    def journal(self, event, arrays):
        self.log.append(event)
        return len(self.log), 1

    def a_lease(self, data, generating):
        tokens = [lease_id for lease_id, lease in self.ledger.leases.items() if lease.generating is generating]
        return self.ledger.leases[data.draw(st.sampled_from(sorted(tokens)))] if tokens else None

    # --- workers ---

    @rule(evaluation=st.booleans())
    def open_group(self, evaluation):
        row = sum(isinstance(event, GroupOpened) for event in self.log)
        self.ledger.open_group(0, row, floor=0, evaluation=evaluation)

    @rule()
    def lease_to_generate(self):
        queue = self.ledger.queue
        if sample := queue.take_evaluation(0) or queue.take_started(0) or queue.take_fresh(0):
            assert not self.ledger.lease(sample, "worker", 0, 0.0).scoring

    @rule(data=st.data(), count=st.integers(1, BUDGET), ends=st.booleans())
    def generate(self, data, count, ends):
        if lease := self.a_lease(data, generating=True):
            self.go_on(lease, count, ends)

    def go_on(self, lease, count, ends):
        sample = lease.sample
        count = min(count, BUDGET - sample.length)
        finish = "stop" if ends or sample.length + count == BUDGET else ""
        assert self.ledger.add_chunk(lease.id, sample.length, count, Version(0, 0), finish) is Verdict.OK
        self.emitted += 0 if sample.group.evaluation else count
        handed_over = bool(finish) and (self.rules.scored_apart or sample.group.group_scored)
        assert (lease.id not in self.ledger.leases) == handed_over
        if handed_over:
            assert sample.state is SampleState.GENERATED and not sample.lease_id
            assert self.ledger.score(lease.id, 1.0) is Verdict.FENCED

    @rule(data=st.data(), cause=st.sampled_from(["lost", "generation_failed", "abort"]))
    def lose_a_worker(self, data, cause):
        if lease := self.a_lease(data, generating=True):
            self.ledger.end_lease(lease.id, cause)

    # --- scorers ---

    @rule(scorer=st.sampled_from(["s0", "s1"]))
    def lease_to_score(self, scorer):
        wait = self.waiting()
        sample = self.ledger.queue.take_scoring()
        assert (sample is None) == (not wait)
        if sample:
            assert sample in wait
            lease = self.ledger.lease(sample, scorer, 0, 0.0)
            assert lease.scoring and not lease.generating
            assert lease.samples == (sample.group.live_samples if sample.group.group_scored else [sample])
            assert all(sample.lease_id == lease.id and sample.state is SampleState.SCORING for sample in lease.samples)

    def waiting(self):
        """Samples that can be scored, derived from the rules: single responses, and the samples of groups in which
        every response is generated."""
        found = []
        for group in self.ledger.groups.values():
            generated = [sample for sample in group.live_samples if sample.state is SampleState.GENERATED]
            if not group.group_scored or len(generated) == len(group.live_samples):
                found += generated
        return found

    @rule(data=st.data())
    def a_group_that_is_not_whole_cannot_be_leased(self, data):
        partly = [
            sample
            for group in self.ledger.groups.values()
            for sample in group.samples
            if group.group_scored and sample.state is SampleState.GENERATED and not group.awaits_scores
        ]
        if partly:
            try:
                self.ledger.lease(data.draw(st.sampled_from(partly)), "s0", 0, 0.0)
            except LedgerError:
                return
            raise AssertionError("a part of a group was leased for its scores")

    @rule(data=st.data(), reward=st.floats(-1, 1))
    def score(self, data, reward):
        if lease := self.a_lease(data, generating=False):
            self.hand_in(lease, reward)

    def hand_in(self, lease, reward):
        ledger, lease_id, samples = self.ledger, lease.id, lease.samples
        rewards, details = [reward + index for index in range(len(samples))], [{"place": 1.0}] * len(samples)
        if lease.for_group:
            assert ledger.score(lease_id, reward) is Verdict.INVALID
            assert ledger.score_group(lease_id, rewards[1:], details[1:]) is Verdict.INVALID
            assert ledger.score_group(lease_id, rewards, details) is Verdict.OK
        else:
            assert ledger.score_group(lease_id, rewards, details) is Verdict.INVALID
            assert ledger.score(lease_id, reward, details[0]) is Verdict.OK
        assert [sample.reward for sample in samples] == rewards
        assert ledger.score(lease_id, reward) is ledger.score_group(lease_id, rewards, details) is Verdict.FENCED

    @rule(data=st.data(), cause=st.sampled_from(LOSSES))
    def lose_a_score(self, data, cause):
        if lease := self.a_lease(data, generating=False):
            samples, attempts = lease.samples, [sample.attempts for sample in lease.samples]
            self.ledger.end_lease(lease.id, cause, "no such unit")
            for sample, before in zip(samples, attempts, strict=True):
                if sample.group.state is GroupState.OPEN:
                    assert sample.attempts == before + (cause != "leave")
                    assert sample.state in (SampleState.GENERATED, SampleState.DEAD)

    @rule(scorer=st.sampled_from(["s0", "s1", "worker"]))
    def kill(self, scorer):
        for lease_id in sorted(self.ledger.leases.held.get(scorer, ())):
            if lease_id in self.ledger.leases:
                self.ledger.end_lease(lease_id, "lost")

    @rule(data=st.data())
    def discard(self, data):
        if groups := self.ledger.open_groups():
            self.ledger.discard(data.draw(st.sampled_from(groups)), "filtered")

    # --- the broker ---

    @rule()
    def take_snapshot(self):
        self.snapshot = (len(self.log), bytes(freeze(self.ledger)))

    @rule(from_snapshot=st.booleans(), apart=st.booleans())
    def restart_broker(self, from_snapshot, apart):
        """Rebuild the ledger from snapshot and journal, and check that it equals the old one; after that, workers or
        scorers may score (`apart`)."""
        again, first = self.new_ledger(), 0
        if from_snapshot and self.snapshot:
            first, encoded = self.snapshot
            thaw(encoded, again)
        for reference, event in enumerate(self.log[first:], start=first + 1):
            again.apply(event, (reference, 1))
        assert freeze(again) == freeze(self.ledger)
        assert again.leases.held == self.ledger.leases.held and again.leases.load == self.ledger.leases.load
        assert again.leases.generating == self.ledger.leases.generating
        assert {lease_id: len(lease.samples) for lease_id, lease in again.leases.items()} == {
            lease_id: len(lease.samples) for lease_id, lease in self.ledger.leases.items()
        }
        self.rules = again.rules = dataclasses.replace(self.rules, scored_apart=apart)
        self.ledger = again

    @rule()
    def everybody_works(self):
        """Work without further faults: every open group must complete."""
        while any(group.state is GroupState.OPEN for group in self.ledger.groups.values()):
            before = len(self.log)
            self.lease_to_generate()
            self.lease_to_score("s0")
            for lease in list(self.ledger.leases.values()):
                if lease.generating:
                    self.go_on(lease, BUDGET, ends=True)
                else:
                    self.hand_in(lease, 0.5)
            assert len(self.log) > before, "something waits that nobody is given"

    # --- what never breaks ---

    @invariant()
    def no_response_is_generated_again(self):
        complete, samples = set(), {}
        for event in getattr(self, "log", ()):
            match event:
                case Leased():
                    samples[event.lease_id] = (event.group, event.index)
                    assert event.scoring == (samples[event.lease_id] in complete)
                case RowsAccepted():
                    for row in event.rows:
                        assert samples[row.lease_id] not in complete
                        if row.finish:
                            complete.add(samples[row.lease_id])
                case SampleScored() | GroupScored():
                    assert samples[event.lease_id] in complete

    @invariant()
    def a_group_is_scored_as_one_or_not_at_all(self):
        for group in self.ledger.groups.values() if hasattr(self, "ledger") else ():
            if group.group_scored:
                states = {sample.state for sample in group.live_samples}
                for alone in (SampleState.SCORING, SampleState.DONE):
                    assert alone not in states or len(states) == 1
                tokens = {sample.lease_id for sample in group.live_samples if sample.state is SampleState.SCORING}
                assert len(tokens) <= 1

    @invariant()
    def the_ledger_closes(self):
        if hasattr(self, "ledger"):
            assert self.ledger.account.closed and self.ledger.account.tokens["generated"] == self.emitted
            for lease_id, lease in self.ledger.leases.items():
                assert all(sample.lease_id == lease_id for sample in lease.samples)


def machine_test(runs):
    found = type("Runs", (Scoring.TestCase,), {})
    found.settings = settings(
        max_examples=runs, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return found


TestScoring, TestManyScorings = machine_test(50), pytest.mark.full(machine_test(200))
