"""Invariants that a ledger must keep after every event, under every schedule; hypothesis checks them."""

from collections import Counter
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from april.broker.conformance.runs import NumberedPrompts, SubmittedPromptsStub
from april.broker.ledger.events import GroupOpened
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import ENDED, GroupState, SampleState


def trains(lease):
    """Whether a lease generates a training sample."""
    return lease.generating and not lease.sample.group.evaluation


class Invariants(RuleBasedStateMachine):
    """Invariants of a ledger, which hypothesis checks after each rule (random action) of a state machine, once the
    machine has a ledger."""

    ledger: Ledger
    ledger_rules: Rules
    log: list[Any]
    """Events that the ledger has written to its journal so far."""
    prompts: NumberedPrompts | SubmittedPromptsStub
    emitted: int
    """Training tokens generated so far."""
    most_consumed: int
    """Largest number of consumed batches so far."""

    @invariant()
    def the_frontier_never_recedes(self):
        if hasattr(self, "ledger"):
            self.most_consumed = max(self.most_consumed, self.ledger.steps.consumed)
            assert self.ledger.steps.frontier == self.most_consumed

    @invariant()
    def the_ledger_closes(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.account.closed
        assert self.ledger.account.tokens["generated"] == self.emitted
        training = [group for group in self.ledger.groups.values() if not group.evaluation]
        for state in (GroupState.OPEN, GroupState.READY, GroupState.DELIVERED):
            members = [group for group in training if group.state is state]
            kept = [s for group in members for s in (group.samples if state == "open" else group.live_samples)]
            assert self.ledger.account.tokens[state] == sum(sample.sampled_tokens for sample in kept)
            assert self.ledger.account.counts[state] == len(members)

    @invariant()
    def an_evaluation_is_of_one_version(self):
        for step, groups in self.ledger.evaluations.items() if hasattr(self, "ledger") else ():
            samples = [sample for group in groups for sample in group.samples_with_forks]
            versions = {version for sample in samples for _, _, version in sample.segments}
            assert versions <= {self.ledger.evaluated_versions.get(step)} and all(v.step == step for v in versions)

    @invariant()
    def the_load_counts_the_generating_leases(self):
        if hasattr(self, "ledger"):
            assert self.ledger.leases.generating == sum(trains(lease) for lease in self.ledger.leases.values())
            of_agents = [lease for lease in self.ledger.leases.values() if lease.agent]
            assert self.ledger.leases.evaluating_agents == sum(lease.sample.group.evaluation for lease in of_agents)

    @invariant()
    def the_counters_match_the_states_of_the_samples(self):
        if not hasattr(self, "ledger"):
            return
        for evaluation in (False, True):
            of_kind = [group for group in self.ledger.groups.values() if group.evaluation == evaluation]
            groups = [group for group in of_kind if group.state is GroupState.OPEN]
            states = Counter(str(sample.state) for group in groups for sample in group.samples)
            assert self.ledger.open_samples.by_state(evaluation) == states
            assert all(group.pending_samples == sum(s.state not in ENDED for s in group.samples) for group in groups)

    @invariant()
    def the_bound_holds(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.bound.holds(self.ledger.steps.next)
        next_step, rules = self.ledger.steps.next, self.ledger_rules
        deadlines = [
            group.opened_at + rules.max_staleness
            for group in self.ledger.groups.values()
            if group.state in (GroupState.OPEN, GroupState.READY) and not group.evaluation
        ]
        for last in range(next_step - 1, next_step + rules.max_staleness + 2):
            due = sum(deadline <= last for deadline in deadlines)
            assert due <= (last - next_step + 1) * rules.batch_groups

    @invariant()
    def segments_and_observations_tile_the_response_and_versions_never_decrease(self):
        if not hasattr(self, "ledger"):
            return
        for group in self.ledger.groups.values():
            for sample in group.samples:
                observed = [(start, stop, None) for start, stop in sample.observations]
                end, after_observation = 0, True
                for start, stop, version in sorted([*sample.segments, *observed], key=lambda span: span[0]):
                    assert start == end < stop
                    assert version is None or version.step >= group.opened_at
                    assert version or not after_observation, "an observation answers a turn"
                    end, after_observation = stop, version is None
                assert end == sample.length
                steps = [version.step for _, _, version in sample.segments]
                assert steps == sorted(steps)
                assert sample.state is not SampleState.PARTIAL or sample.length > 0

    @invariant()
    def no_prompt_is_drawn_twice_or_skipped(self):
        if not hasattr(self, "ledger"):
            return
        opened = [event for event in self.log if isinstance(event, GroupOpened) and not event.evaluation]
        fresh = [(event.epoch, event.row) for event in opened if event.replaces is None]
        rows = self.prompts.rows
        assert fresh == [(i // rows, i % rows) for i in range(len(fresh))]

    @invariant()
    def a_submitted_prompt_is_kept_as_long_as_it_is_needed(self):
        if not hasattr(self, "ledger") or not self.ledger_rules.submitted:
            return
        ledger, dead = self.ledger, {letter.row for letter in self.ledger.dead_letters.letters}
        undrawn = set(range(ledger.prompts.next[1], ledger.prompts.submitted_count))
        needed = undrawn | {group.row for group in ledger.groups.values() if not group.evaluation}
        assert needed <= set(ledger.prompts.submitted) <= needed | dead
        assert all(epoch == 0 for epoch, _ in ledger.dead_letters.requeued.values())

    @invariant()
    def a_requeued_prompt_is_drawn_once_more_and_ahead_of_fresh_ones(self):
        if not hasattr(self, "ledger"):
            return
        waiting, prompts = [], {}
        for event in self.log:
            match type(event).__name__:
                case "GroupRequeued":
                    waiting.append(event.group)
                case "GroupOpened" if not event.evaluation:
                    prompts[event.group] = (event.epoch, event.row)
                    assert event.replaces == (waiting.pop(0) if waiting else None)
                    assert event.replaces is None or prompts[event.replaces] == prompts[event.group]
        assert list(self.ledger.dead_letters.requeued) == waiting
