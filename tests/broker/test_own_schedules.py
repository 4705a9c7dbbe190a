"""Schedules of the user's own that cannot work: the check finds them, and a run with one ends with a sentence."""

import sys

import pytest

from april import wire
from april.broker.conformance.runs import try_schedule
from april.broker.ledger.ledger import Ledger, LedgerError
from april.broker.ledger.rules import Rules
from april.broker.schedules.schedule import ScheduleFailed
from april.config import ScheduleSection
from april.simulate.pipeline import SimulationStuck, simulate
from april.wire.message import Version
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, train
from tests.support.simulated_scenarios import scenario

MODULE = """
from april.broker.schedules.continuous import ContinuousSchedule
from april.broker.schedules.rounds import ActivePartialSchedule


class Newest(ContinuousSchedule):
    def next_batch(self, ledger):
        newest = sorted(ledger.ready, key=lambda group: group.id)[-ledger.rules.batch_groups :]
        return newest if len(newest) == ledger.rules.batch_groups else None


class Stops(ActivePartialSchedule):
    def next_batch(self, ledger):
        return super().next_batch(ledger) if ledger.steps.next < 1 else None


class HandsOutNothing(ActivePartialSchedule):
    def hands_out(self, ledger, step):
        return super().hands_out(ledger, step) and ledger.steps.next < 1


class Loses(ActivePartialSchedule):
    def next_sample(self, ledger, step):
        sample = super().next_sample(ledger, step)
        return sample if sample is None or sample.length == 0 else None


class Raises(ActivePartialSchedule):
    def next_sample(self, ledger, step):
        return {}[step]


class Meddles(ActivePartialSchedule):
    def hands_out(self, ledger, step):
        return bool(ledger.groups)


class Spins(ActivePartialSchedule):
    def advance(self, ledger):
        super().advance(ledger)
        return True


class Twice(ActivePartialSchedule):
    def next_sample(self, ledger, step):
        self.last = getattr(self, "last", None) or super().next_sample(ledger, step)
        return self.last
"""
EVERY = ["Newest", "Stops", "HandsOutNothing", "Loses", "Raises", "Meddles", "Spins", "Twice"]


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_schedules.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_schedules", None)


@pytest.mark.parametrize("name", EVERY)
def test_the_runs_of_the_check_find_it(name):
    with pytest.raises((AssertionError, ScheduleFailed, LedgerError)):
        try_schedule(ScheduleSection(kind=f"own_schedules:{name}"), steps=8)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sync", "april", "continuous"])
def test_shipped_schedules_come_to_the_end_of_these_runs(kind):
    try_schedule(ScheduleSection(kind=kind))


def test_a_batch_that_leaves_a_due_group_out_is_not_delivered(monkeypatch):
    ledger = Ledger(Rules(batch_groups=1, group_size=1, max_staleness=1))
    ledger.start_learner(0)
    early, late = (ledger.open_group(0, row, floor=0) for row in range(2))
    for group in (early, late):
        lease = ledger.lease(group.samples[0], "w", 0, 0.0)
        ledger.add_chunk(lease.id, 0, 1, Version(0, 0), "stop")
        ledger.score(lease.id, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(ledger.ready, "oldest", None)
        assert not ledger.batch_fault([late]), "a good batch is not compared with all that wait"
    third = ledger.deliver([late])
    assert third == 0, "the early one still fits batch 1"
    newest = ledger.open_group(0, 2, floor=1)
    for groups, why in (([], "has 0 groups"), ([early, early], "has 2 groups"), ([late], "not complete, or are in a")):
        with pytest.raises(LedgerError, match=why):
            ledger.deliver(groups)
    lease = ledger.lease(newest.samples[0], "w", 1, 0.0)
    ledger.consume(0)
    ledger.add_chunk(lease.id, 0, 1, Version(0, 1), "stop")
    ledger.score(lease.id, 1.0)
    with pytest.raises(LedgerError, match=f"leaves out group {early.id},"):
        ledger.deliver([newest])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("HandsOutNothing", "nothing can happen any more: for 30 s, key 'schedule.kind' = 'own_schedules:HandsOut"),
        ("Raises", "schedule 'own_schedules:Raises' failed in next_sample: KeyError: 0; mend it"),
        ("Meddles", "a schedule may not use ledger.groups, but account,"),
        ("Spins", "rounds end one after the other"),
        ("Twice", "is not waiting"),
    ],
)
def test_a_run_with_it_ends_with_a_sentence(converse, name, sentence):
    talk = converse("--schedule.kind", f"own_schedules:{name}", "--evaluation.prompts", "1")
    worker, learner = joined(FakeWorker(talk)), joined(FakeLearner(talk))
    if name == "HandsOutNothing":
        train(talk, worker, learner, 0)
    for _ in range(40):
        assert talk.service.run.over or name == "HandsOutNothing"
        worker.say(wire.Heartbeat(), connection=b"control")
        talk.tick(1.0)
    assert talk.service.run.state == "failed" and sentence in talk.service.run.over
    assert talk.status()["phase"] == "finished"


@pytest.mark.parametrize("name", ["Stops", "HandsOutNothing"])
def test_a_simulation_of_it_is_a_sentence(name):
    stuck = scenario(schedule__kind=f"own_schedules:{name}", engines__failure_every_s=500.0)
    with pytest.raises((SimulationStuck, ScheduleFailed), match=rf"schedule 'own_schedules:{name}' (stands|failed)"):
        simulate(stuck)
