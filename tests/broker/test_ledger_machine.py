"""Random orders of events: the token counters close, the staleness bound holds and no sample starves.

Beyond the checks of `april check schedule`, the order in which the shipped schedules hand out waiting samples is
tested.
"""

import pytest
from hypothesis import HealthCheck, settings

from april.broker.conformance import machine
from april.broker.conformance.runs import run_to_the_end
from april.broker.conformance.suite import machine_of
from april.broker.journal.snapshot import Parts
from april.broker.ledger.events import BatchDelivered
from april.broker.ledger.ledger import Ledger, Rules
from april.broker.ledger.samples import TO_GENERATE, GroupState, SampleState
from april.broker.schedules.continuous import ContinuousSchedule
from april.config import ScheduleSection

BEYOND_ITS_SHARE = (5,)
"""Rank of an evaluation sample once evaluation uses its full share of a worker's slots; a lower rank is handed out
first."""


@pytest.fixture(autouse=True)
def queues_are_cleaned_often(monkeypatch):
    monkeypatch.setattr("april.broker.ledger.queues.CLEANING_PUSHES", 3)


class ScheduleMachine(machine.ScheduleMachine):
    @property
    def continuous(self):
        return isinstance(self.schedule, ContinuousSchedule)

    def journal(self, event, arrays):
        if isinstance(event, BatchDelivered) and self.continuous:
            assert self.ledger.steps.consumed == event.step, "the learner still has a batch"
        return super().journal(event, arrays)

    def choose(self, version, share_left):
        ranks = {sample: self.rank(sample, share_left) for sample in self.waiting_for(version)}
        sample = super().choose(version, share_left)
        if sample is None:
            assert not ranks
            return None
        assert sample in ranks or all(rank == BEYOND_ITS_SHARE for rank in ranks.values())
        assert sample not in ranks or ranks[sample] == min(ranks.values())
        return sample

    def waiting_for(self, version):
        """Samples that a worker under `version` may be given, derived from the rules independently of the queues."""
        ledger, step = self.ledger, version.step
        evaluated = [s for group in ledger.evaluations.get(step, ()) for s in group.samples if s.segments]
        evaluates = all(of == version for sample in evaluated for _, _, of in sample.segments)
        permitted = ledger.rounds.open and step >= self.schedule.floor(ledger)
        if self.continuous:
            permitted = ledger.rounds.open and ledger.leases.generating < self.section.most_in_flight
        for group in ledger.groups.values():
            for sample in group.samples if group.state is GroupState.OPEN else ():
                permits = (evaluates and group.opened_at == step) if group.evaluation else permitted
                generates = sample.state in TO_GENERATE and sample.first_step <= step and permits
                if sample.state is SampleState.GENERATED or generates:
                    yield sample

    def rank(self, sample, share_left):
        """Sort key of a waiting sample, lowest first: responses to score, groups at the staleness bound, evaluation,
        lost samples, partial samples by age and expected length, siblings, fresh groups."""
        group = sample.group
        expected = max([sample.length, *(sibling.length for sibling in group.samples if sibling.finish_reason)])
        started_order = (
            group.opened_at,
            sample.attempts == 0 and sample.length == 0,
            -expected,
            group.id,
            sample.index,
        )
        if sample.state is SampleState.GENERATED:
            return (0,)
        if group.evaluation:
            return (2, sample.attempts == 0, group.id) if share_left else BEYOND_ITS_SHARE
        if not group.started:
            return (4, group.id, sample.index)
        if group.opened_at + self.ledger_rules.max_staleness <= self.ledger.steps.next:
            return (1, *started_order)
        return (3, sample.attempts == 0, *started_order)


def machine_test(kind, runs):
    found = machine_of(kind, ScheduleMachine).TestCase
    found.settings = settings(
        max_examples=runs, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return found


TestRounds, TestContinuous = machine_test("april", 50), machine_test("continuous", 50)
TestManyRounds, TestManyContinuous = (pytest.mark.full(machine_test(kind, 300)) for kind in ("april", "continuous"))


def test_a_snapshot_covers_every_attribute_of_the_ledger():
    """Each attribute of the ledger is either stored in a snapshot or derived from the rest."""
    stored = {*Parts.__struct_fields__, "groups", "ready", "deliveries", "evaluations", "leases"}
    outside = {"rules", "write", "group_scored", "keep_images", "prompt_order", "observer", "clock"}
    derived = {"unfiltered", "open_samples", "queue", "bound", "evaluated_versions", "_expiries"}
    assert set(vars(Ledger(Rules(1, 1, 0)))) == stored | outside | derived


SCHEDULES = {
    "sync": {},
    "april": {"over_sampling_batch_size": 8},
    "steps": {"over_sampling_batch_size": 3},
    "overlap": {"over_sampling_batch_size": 8, "overlap": True},
    "no_partial": {"over_sampling_batch_size": 8, "partial_rollout": False},
    "continuous": {"kind": "continuous", "in_flight": 5},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_run_without_faults_comes_to_its_end(kind):
    """Every schedule delivers all batches when workers and learner simply do their work."""
    ledger = run_to_the_end(ScheduleSection(rollout_batch_size=4, n_samples_per_prompt=2, **SCHEDULES[kind]))
    assert (ledger.account.discarded["aborted"] > 0) == (kind == "no_partial")
    if kind in ("sync", "steps"):
        assert ledger.account.counts[GroupState.OPEN] == 0
