"""Hypothesis state machine: applies workers', learner's and operators' actions to a ledger in random order.

After every action no token may be missing from the ledger's account, the staleness bound must hold and no waiting
sample may starve. Workers join, leave and lag; the learner may stall or restart. The actions (hypothesis rules) are
here, the invariants in `invariants.py`; both apply to every schedule.
"""

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from april.broker.conformance.invariants import Invariants, trains
from april.broker.conformance.runs import NumberedPrompts, SubmittedPromptsStub, advance
from april.broker.filters import GroupFilters, zero_spread
from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.admission import Verdict
from april.broker.ledger.events import BatchDelivered, GroupDiscarded, Leased, PromptSubmitted
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import NOT_EVALUATED, TO_GENERATE, GroupState, SampleState
from april.broker.plan import make_schedule, section_of
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import choose_sample
from april.config import ConfigError, ScheduleSection
from april.wire.message import Version
from april.wire.rows import observation_row, pack_rows

# --- random configurations --------------------------------------------------------------------------------------------


@st.composite
def schedule_sections(draw, rules: Rules, name: str) -> ScheduleSection:
    """Strategy for random [schedule] sections of the kind `name` that suit a ledger with these rules."""
    batch, n, staleness = rules.batch_groups, rules.group_size, rules.max_staleness
    common = {
        "kind": name,
        "rollout_batch_size": batch,
        "n_samples_per_prompt": n,
        "max_staleness": staleness,
        "max_steps": draw(st.sampled_from([2, 6, 1000])),
        "last_batch": draw(st.sampled_from(["train", "drop"])),
    }
    kind = SCHEDULES.find(name)
    own: dict[str, Any] = {}
    if "in_flight" in kind.reads:
        own["in_flight"] = draw(st.none() | st.integers(1, (staleness + 1) * batch * n))
    elif "over_sampling_batch_size" in kind.reads:
        own["over_sampling_batch_size"] = max(1, round(draw(st.floats(0.3, 6)) * batch))
    if "partial_rollout" in kind.reads:
        own["partial_rollout"] = draw(st.booleans())
    if "overlap" in kind.reads:
        own["overlap"] = staleness > 0 and draw(st.booleans())
    section = section_of(name)(**common, **own)
    try:
        kind.check(section)
    except ConfigError:
        return section_of(name)(**common)
    return section


# --- the state machine ------------------------------------------------------------------------------------------------


RESPONSE_BUDGET = 12
RECORD_BYTES = 100
"""Assumed length of every journal record, bytes; the state machine has no real journal."""
SLOTS = 4
"""Slots of each worker in the rule `everybody_works`: responses that it generates at once."""
PATIENCE_TURNS = 3000
"""Most loop iterations of the rule `everybody_works` until every waiting sample has been leased; far more than
needed."""


def has_spread(group):
    rewards = {sample.reward for sample in group.samples if sample.state is SampleState.DONE}
    return len(rewards) > 1


def submitted_prompt(row):
    return PromptSubmitted(row, "", "", b"")


class ScheduleMachine(Invariants):
    """The hypothesis rules: every action of workers, learner, trainer, operators and broker that may change a
    ledger."""

    kind: str
    """Kind of the schedule that the run begins with."""
    others: tuple[str, ...] = ()
    """Kinds of schedule that a restarted broker may switch to."""

    @initialize(
        data=st.data(),
        batch_groups=st.integers(1, 4),
        group_size=st.integers(2, 3),
        max_staleness=st.integers(0, 3),
        rows=st.integers(1, 12) | st.integers(1, 60),
        epochs=st.sampled_from([1, 2, 50]),
        min_group_size=st.sampled_from([None, 1]),
        dynamic_sampling=st.booleans(),
        submitted=st.booleans(),
    )
    def start(
        self, data, batch_groups, group_size, max_staleness, rows, epochs, min_group_size, dynamic_sampling, submitted
    ):
        self.ledger_rules = Rules(
            batch_groups,
            group_size,
            max_staleness,
            max_attempts=3,
            min_group_size=min_group_size,
            max_response_tokens=RESPONSE_BUDGET,
            filtered=dynamic_sampling,
            submitted=submitted,
        )
        self.log = []
        self.snapshot = None
        self.ledger = Ledger(self.ledger_rules, write=self.journal)
        self.prompts = SubmittedPromptsStub(self.ledger) if submitted else NumberedPrompts(rows, epochs)
        self.filters = GroupFilters(ScheduleSection(dynamic_sampling=dynamic_sampling))
        self.choose_schedule(data, self.kind)
        self.ledger.start_learner(0)
        self.versions = {"w0": Version(0, 0), "w1": Version(0, 0)}
        self.emitted = 0
        self.most_consumed = 0
        self.advance()

    def choose_schedule(self, data, kind):
        self.section = data.draw(schedule_sections(self.ledger_rules, kind))
        self.schedule = make_schedule(self.section, self.prompts)

    def journal(self, event, arrays):
        if isinstance(event, GroupDiscarded):
            permitted = {"filtered"} if self.section.partial_rollout else {"filtered", "aborted"}
            permitted |= {zero_spread.__name__} if self.ledger_rules.filtered else set()
            permitted = {NOT_EVALUATED} if self.ledger.groups[event.group].evaluation else permitted
            assert event.reason in permitted, "nothing is thrown away for its age"
            if event.reason == zero_spread.__name__:
                assert self.ledger.groups[event.group].state is GroupState.READY
                assert not has_spread(self.ledger.groups[event.group])
        if isinstance(event, BatchDelivered) and self.ledger_rules.filtered:
            assert all(has_spread(self.ledger.groups[group]) for group in event.groups)
        self.log.append(event)
        return len(self.log), RECORD_BYTES

    def advance(self):
        """Advance the schedule as the broker's service does: the group filter first discards complete groups, so that
        none of them gets into a batch."""
        self.ledger.filter_ready(self.filters.reason_against)
        advance(self.schedule, self.ledger)

    def a_lease(self, data, generating):
        lease_ids = [lease_id for lease_id, lease in self.ledger.leases.items() if lease.generating is generating]
        return self.ledger.leases[data.draw(st.sampled_from(sorted(lease_ids)))] if lease_ids else None

    # --- workers ---

    @rule(worker=st.sampled_from(["w0", "w1"]), count=st.integers(1, 6), share_left=st.booleans())
    def lease(self, worker, count, share_left=True):
        if self.ledger.rounds.draining:
            return
        for _ in range(count):
            sample = self.choose(self.versions[worker], share_left)
            if sample is None:
                return
            lease = self.ledger.lease(sample, worker, self.versions[worker].step, expires_at=0.0)
            kind = type(self.schedule)
            if kind.dial and kind.dial.counts_samples and trains(lease):
                assert self.ledger.leases.generating <= kind.samples_in_flight(self.section)

    def choose(self, version, share_left):
        """Next sample for a worker with weights `version`, or None. `share_left`: evaluation may take more slots."""
        return choose_sample(self.schedule, self.ledger, version, share_left)

    @rule(data=st.data(), count=st.integers(1, RESPONSE_BUDGET), ends=st.booleans())
    def generate(self, data, count, ends):
        if lease := self.a_lease(data, generating=True):
            self.go_on(lease, count, ends)
            self.advance()

    @rule(data=st.data(), count=st.integers(1, 4), ends=st.booleans())
    def observe(self, data, count, ends):
        """Append an observation of `count` tokens, which do not count as generated; `ends`: it ends the response."""
        if lease := self.a_lease(data, generating=True):
            sample = lease.sample
            count = min(count, RESPONSE_BUDGET - sample.length)
            finish = "stop" if ends or sample.length + count == RESPONSE_BUDGET else ""
            there_is_a_turn = sample.length > 0 and sample.sampled_until == sample.length
            row = observation_row(lease.id, sample.length, count, finish, b"state")
            [verdict] = self.ledger.add_chunks(pack_rows([row]), b"state")
            assert verdict is (Verdict.OK if there_is_a_turn else Verdict.INVALID)
            self.advance()

    @rule(data=st.data(), offset=st.integers(-3, 3).filter(bool))
    def chunk_out_of_place(self, data, offset):
        if lease := self.a_lease(data, generating=True):
            start = lease.sample.length + offset
            if start >= 0:
                verdict = self.ledger.add_chunk(lease.id, start, 1, self.versions[lease.worker])
                assert verdict is (Verdict.DUPLICATE if offset < 0 else Verdict.GAP)

    @rule(data=st.data())
    def chunk_of_another_version_or_holder(self, data):
        if lease := self.a_lease(data, generating=True):
            length = lease.sample.length
            if lease.step:
                assert self.ledger.add_chunk(lease.id, length, 1, Version(0, lease.step - 1)) is Verdict.FENCED
            assert self.ledger.add_chunk(lease.id + 100_000, length, 1, Version(9, 999)) is Verdict.FENCED
            if not trains(lease):
                newer = self.ledger.add_chunk(lease.id, length, 1, Version(0, lease.step + 1))
                assert newer in (Verdict.FENCED, Verdict.INVALID), "an evaluation is of one version"

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def score(self, data, reward):
        if lease := self.a_lease(data, generating=False):
            assert self.ledger.score(lease.id, reward) is Verdict.OK
            assert self.ledger.score(lease.id, reward) is Verdict.FENCED
            self.advance()

    @rule(data=st.data(), generating=st.booleans(), cause=st.sampled_from(["lost", "expired", "generation_failed"]))
    def lose(self, data, generating, cause):
        if lease := self.a_lease(data, generating):
            self.ledger.end_lease(lease.id, cause)
            self.advance()

    @rule(data=st.data(), worker=st.sampled_from(["w0", "w1"]))
    def recall(self, data, worker):
        """Recall a training sample in generation from its worker. If it has tokens, and `worker` may have it, lease it
        to `worker` ahead of all waiting samples."""
        lease = self.a_lease(data, generating=True)
        if lease is None or not trains(lease):
            return
        sample, step = lease.sample, self.versions[worker].step
        attempts, length = sample.attempts, sample.length
        self.ledger.end_lease(lease.id, "recall")
        assert (sample.attempts, sample.length) == (attempts, length), "a recall is no failed attempt"
        assert self.ledger.add_chunk(lease.id, length, 1, self.versions[lease.worker]) is Verdict.FENCED
        hands_out = not self.ledger.rounds.draining and self.schedule.hands_out(self.ledger, step)
        if length and step >= sample.first_step and hands_out:
            self.ledger.lease(sample, worker, step, expires_at=0.0)
        self.advance()

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def kill_worker(self, worker):
        for lease in [lease for lease in self.ledger.leases.values() if lease.worker == worker]:
            if lease.id in self.ledger.leases:
                self.ledger.end_lease(lease.id, "lost")
        self.advance()

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def hand_back_what_was_aborted(self, worker):
        for lease in list(self.ledger.leases.values()):
            if lease.worker == worker and trains(lease) and lease.id <= self.ledger.rounds.watermark:
                self.ledger.end_lease(lease.id, "abort")
        self.advance()

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def load_weights(self, worker):
        """Load the newest weights, after giving back the held-out samples, whose evaluation is of the old weights."""
        if self.ledger.steps.consumed < self.ledger.steps.frontier:
            return
        for lease in self.held_out_leases(worker):
            self.ledger.end_lease(lease.id, "recall")
        self.versions[worker] = Version(self.ledger.learner.incarnation, self.ledger.steps.consumed)

    def held_out_leases(self, worker):
        leases = [lease for lease in self.ledger.leases.values() if lease.worker == worker]
        return [lease for lease in leases if lease.generating and not trains(lease)]

    @rule(
        seed=st.integers(0, 2**32),
        actions=st.integers(20, 200),
        stragglers=st.floats(0, 0.5),
        failures=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def a_busy_while(self, seed, actions, stragglers, failures):
        """Apply `actions` random actions in a row, drawn by `seed`. `stragglers`: share of groups that rarely progress;
        `failures`: chance that a lease fails. Discarded groups with a dead sample may be re-queued."""
        chance = random.Random(seed)
        self.end_drain()
        for _ in range(actions):
            worker = chance.choice(list(self.versions))
            if chance.random() < 0.2:
                self.load_weights(worker)
            self.hand_back_what_was_aborted(worker)
            self.lease(worker, chance.randrange(4))
            for lease in list(self.ledger.leases.values()):
                slow = random.Random(lease.sample.group.id).random() < stragglers
                if lease.worker != worker or (slow and chance.random() < 0.95) or lease.id not in self.ledger.leases:
                    continue
                if chance.random() < failures:
                    self.ledger.end_lease(lease.id, "generation_failed")
                    continue
                self.go_on(lease, chance.randint(1, RESPONSE_BUDGET), ends=chance.random() < 0.5)
            if dead := self.ledger.dead_letters.discarded_groups():
                self.ledger.requeue(chance.choice(dead))
            self.advance()
            if self.ledger.steps.consumed < self.ledger.steps.next and chance.random() < 0.7:
                self.consume()
            self.the_bound_holds()

    @rule(count=st.integers(1, 3))
    def evaluate(self, count):
        if sum(group.evaluation for group in self.ledger.groups.values()) < 6:
            for row in range(count):
                step = self.ledger.steps.consumed
                self.ledger.open_group(step, row, floor=step, evaluation=True, size=1)

    @rule()
    def give_up_evaluations(self):
        """Give up evaluations of versions that no worker has any more: discard their unfinished groups or, at the
        current policy step, start the evaluation again."""
        for step, groups in list(self.ledger.evaluations.items()):
            if any(version.step == step and self.ledger.may_evaluate(version) for version in self.versions.values()):
                continue
            if step < self.ledger.steps.consumed:
                for group in groups:
                    if group.state is GroupState.OPEN and group.unfinished:
                        self.ledger.discard(group, NOT_EVALUATED)
            elif step == self.ledger.steps.consumed and step in self.ledger.evaluated_versions:
                self.ledger.restart_evaluation(step)
                self.ledger.open_group(step, 0, floor=step, evaluation=True, size=1)

    @rule()
    def record_evaluations(self):
        for step, groups in list(self.ledger.evaluations.items()):
            if all(group.state is not GroupState.OPEN for group in groups):
                self.ledger.record_evaluation(step, {"prompts": len(groups)})

    @rule(data=st.data())
    def filter_out(self, data):
        """Discard a complete group as if a group filter had rejected it."""
        if self.ledger.ready:
            self.ledger.discard(data.draw(st.sampled_from(list(self.ledger.ready))), "filtered")
            self.advance()

    @rule(every=st.integers(1, 9))
    def everybody_works(self, every):
        """Let all workers generate without faults: each waiting sample must get leased, and the learner the next batch.

        In every `every`-th pass of the loop an evaluation is opened; it may take half of each worker's slots.
        """
        self.ledger.end_drain()
        ledger, turn, since = self.ledger, 0, len(self.log)
        next_step, waiting = ledger.steps.next, self.waiting()
        while not self.over() and (ledger.steps.consumed <= next_step or self.still_wait(waiting, since)):
            turn += 1
            assert turn < PATIENCE_TURNS, "the run has come to a standstill"
            if turn % every == 0:
                self.evaluate(1)
            for worker in self.versions:
                if not self.held_out_leases(worker):
                    self.load_weights(worker)
                self.hand_back_what_was_aborted(worker)
                self.fill(worker)
                for lease in [lease for lease in ledger.leases.values() if lease.worker == worker]:
                    self.go_on(lease, count=1 + lease.sample.group.id % 5, ends=lease.sample.index == 0)
            self.give_up_evaluations()
            self.advance()
            if ledger.steps.consumed < ledger.steps.next:
                self.consume()
            elif self.schedule.wants_prompts(ledger):
                self.submit_prompts()
            self.the_bound_holds()

    def over(self):
        return self.schedule.finished(self.ledger) and self.ledger.steps.consumed == self.ledger.steps.next

    def waiting(self):
        return [s for g in self.ledger.groups.values() for s in g.samples if s.state in TO_GENERATE]

    def still_wait(self, waiting, since):
        leased = {(event.group, event.index) for event in self.log[since:] if isinstance(event, Leased)}
        return [s for s in waiting if s.group.state is GroupState.OPEN and (s.group.id, s.index) not in leased]

    def fill(self, worker):
        """Lease samples to a worker until its slots are full or no sample waits."""
        for _ in range(SLOTS):
            held = [lease for lease in self.ledger.leases.values() if lease.worker == worker and lease.generating]
            if len(held) < SLOTS:
                self.lease(worker, 1, share_left=sum(not trains(lease) for lease in held) < SLOTS // 2)

    def go_on(self, lease, count, ends):
        """Generate `count` tokens under a lease, the last of the response if `ends`; score it under a scoring lease."""
        if not lease.generating:
            reward = 1.0 if lease.sample.group.id % 4 == 3 else float(lease.sample.index % 2)
            assert self.ledger.score(lease.id, reward) is Verdict.OK
            return
        sample, version = lease.sample, self.versions[lease.worker]
        count = min(count, RESPONSE_BUDGET - sample.length)
        finish = "stop" if ends or sample.length + count == RESPONSE_BUDGET else ""
        verdict = self.ledger.add_chunk(lease.id, sample.length, count, version, finish)
        if verdict is Verdict.FENCED and sample.group.evaluation and not self.ledger.may_evaluate(version):
            self.ledger.end_lease(lease.id, "recall")  # since its lease another worker began with other weights
            return
        assert verdict is Verdict.OK
        self.emitted += 0 if sample.group.evaluation else count

    @precondition(lambda self: self.ledger.leases and not self.ledger.rounds.draining)
    @rule(data=st.data(), generating=st.booleans(), requeue=st.booleans())
    def fail_until_it_is_dead(self, data, generating, requeue):
        if lease := self.a_lease(data, generating):
            sample, worker = lease.sample, lease.worker
            while sample.state is not SampleState.DEAD:
                if not sample.lease_id:
                    newest = sample.first_step if sample.group.evaluation else self.versions[worker].step
                    self.ledger.lease(sample, worker, max(sample.first_step, newest), 0.0)
                self.ledger.end_lease(sample.lease_id, "generation_failed", "engine fell over", 1.0)
            if requeue:
                self.ledger.requeue(sample.group.id)
            self.advance()

    # --- operators ---

    @precondition(lambda self: self.ledger.dead_letters.letters)
    @rule(data=st.data())
    def requeue_a_dead_group(self, data):
        letter = data.draw(st.sampled_from(self.ledger.dead_letters.letters))
        verdict = {"without_it": Verdict.INVALID, "discarded": Verdict.OK}.get(letter.outcome, Verdict.DUPLICATE)
        assert self.ledger.requeue(letter.group) is verdict
        assert self.ledger.requeue(letter.group) is not Verdict.OK
        self.advance()

    @rule()
    def drain(self):
        self.ledger.start_drain()
        training = [lease_id for lease_id, lease in self.ledger.leases.items() if lease.generating and trains(lease)]
        assert all(self.ledger.is_aborted(lease_id) for lease_id in training)

    @rule()
    def end_drain(self):
        self.ledger.end_drain()

    # --- learner ---

    @precondition(lambda self: self.ledger.steps.consumed < self.ledger.steps.next)
    @rule(discarded=st.sampled_from(["", "", "nonfinite"]))
    def consume(self, discarded=""):
        step = self.ledger.steps.consumed
        assert self.ledger.consume(step, discarded) is Verdict.OK
        assert self.ledger.consume(step) is Verdict.DUPLICATE
        for group in self.ledger.deliveries[step]:
            for sample in group.samples:
                for _, _, version in sample.segments:
                    assert 0 <= step - version.step <= self.ledger_rules.max_staleness
        self.advance()

    @rule()
    def checkpoint(self):
        self.ledger.checkpoint(self.ledger.steps.consumed, oldest=self.ledger.steps.durable)

    @rule()
    def restart_learner_from_checkpoint(self):
        before = {step: [g.id for g in groups] for step, groups in self.ledger.deliveries.items()}
        self.ledger.start_learner(self.ledger.steps.durable)
        assert before == {step: [g.id for g in groups] for step, groups in self.ledger.deliveries.items()}

    @precondition(lambda self: self.ledger_rules.submitted)
    @rule(count=st.integers(0, 9), again=st.integers(0, 3))
    def submit_prompts(self, count=1, again=0):
        """Submit `count` prompts as a trainer does, the first `again` of which it has sent before: those are
        duplicates. A prompt that skips a number is refused as a gap."""
        first = max(0, self.ledger.prompts.submitted_count - again)
        for row in range(first, first + count):
            known = row < self.ledger.prompts.submitted_count
            assert self.ledger.submit(submitted_prompt(row), b"") is (Verdict.DUPLICATE if known else Verdict.OK)
        assert self.ledger.submit(submitted_prompt(self.ledger.prompts.submitted_count + 1), b"") is Verdict.GAP
        self.advance()

    # --- broker ---

    @rule()
    def take_snapshot(self):
        self.snapshot = (len(self.log), bytes(freeze(self.ledger)))

    @rule(data=st.data(), from_snapshot=st.booleans(), same=st.booleans())
    def restart_broker(self, data, from_snapshot, same):
        """Restart the broker: the journal, after the snapshot if `from_snapshot`, must rebuild the same ledger. The
        schedule stays as it is if `same`; otherwise its kind and settings are drawn anew."""
        again = Ledger(self.ledger_rules, write=self.journal)
        first = 0
        if from_snapshot and self.snapshot:
            first, encoded = self.snapshot
            thaw(encoded, again)
        for reference, event in enumerate(self.log[first:], start=first + 1):
            again.apply(event, (reference, RECORD_BYTES))
        assert freeze(again) == freeze(self.ledger)
        for index in ("held", "load", "generating"):
            assert getattr(again.leases, index) == getattr(self.ledger.leases, index)
        assert again.bound.__dict__ == self.ledger.bound.__dict__
        assert sorted(again.leases) == sorted(self.ledger.leases)
        self.ledger = again
        if self.ledger_rules.submitted:
            self.prompts = SubmittedPromptsStub(again)
        if same:
            self.schedule = make_schedule(self.section, self.prompts)
        else:
            self.choose_schedule(data, data.draw(st.sampled_from([self.kind, *self.others])))
