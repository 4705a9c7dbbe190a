"""Evaluations of a run whose steps are quick and whose held-out samples are slow are each of the version they name."""

import pytest

from april.broker.ledger.events import BatchConsumed, EvaluationRecorded, GroupOpened, Leased, RowsAccepted
from tests.support.journal_events import events
from tests.support.run_processes import steps_recorded, wait_until

QUICK_STEPS = ["--rollout-batch-size", "2", "--schedule.max_steps", "16", "--learner.ranks", "1"]
SLOW_SAMPLES = [
    "--evaluation.every", "4", "--evaluation.prompts", "16", "--evaluation.samples", "4", "--evaluation.share", "0.25",
    "--sampling.max_response_tokens", "100", "--worker.slots", "4", "--worker.prefetch", "0",
]  # fmt: skip
SCHEDULES = {
    "continuous": ["--schedule.kind", "continuous", "--over-sampling-batch-size", "4", "--schedule.max_staleness", "3"],
    "rounds": ["--over-sampling-batch-size", "3"],
}


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_evaluation_mixes_versions(finish_run, run_dir, schedule):
    _, summary = finish_run(*QUICK_STEPS, *SLOW_SAMPLES, *SCHEDULES[schedule])
    check(summary["evaluation"], run_dir)
    assert all(point["not_evaluated"] == 0 for point in (summary["evaluation"][0], summary["evaluation"][-1]))
    assert summary["staleness"]["max"] <= 5
    if schedule == "continuous":
        assert overtaken(run_dir), "no evaluation went on while newer weights existed"


@pytest.mark.full
def test_evaluations_end_and_mix_no_versions_though_worker_learner_and_broker_die(start_run, run_dir, gate):
    job = start_run(*gate.hold(6), *QUICK_STEPS, *SLOW_SAMPLES, *SCHEDULES["continuous"])
    for step, victim in ((1, "april.cli worker"), (3, "-u -m april.learner"), (5, "april.cli broker")):
        wait_until(lambda step=step: steps_recorded(run_dir) >= step, job)
        job.kill(victim)
    gate.open()
    assert job.wait() == 0, job.output
    check([event.result for event in events(run_dir) if isinstance(event, EvaluationRecorded)], run_dir)


def check(evaluations, run_dir):
    assert sorted(point["step"] for point in evaluations) == [0, 4, 8, 12, 16]
    for point in evaluations:
        assert point["versions"] in ([], [point["version"]]) and point["prompts"] + point["not_evaluated"] == 16
        assert not point["versions"] or point["version"][1] == point["step"]
    for step, versions in held_out_versions(run_dir).items():
        assert {version.step for version in versions} == {step}


def held_out_versions(run_dir):
    """Versions of all held-out tokens in the journal, by evaluated step."""
    evaluated, holders, versions = {}, {}, {}
    for event in events(run_dir):
        match event:
            case GroupOpened(group=group, evaluation=True, floor=step):
                evaluated[group] = step
            case Leased(lease_id=lease_id, group=group):
                holders[lease_id] = group
            case RowsAccepted():
                for row in event.rows:
                    if (group := holders[row.lease_id]) in evaluated:
                        versions.setdefault(evaluated[group], set()).add(row.version)
    return versions


def overtaken(run_dir):
    """Steps whose evaluation got tokens after the learner had newer weights."""
    consumed, found, holders, held_out = 0, set(), {}, set()
    for event in events(run_dir):
        match event:
            case GroupOpened(group=group, evaluation=True):
                held_out.add(group)
            case Leased(lease_id=lease_id, group=group):
                holders[lease_id] = group
            case BatchConsumed(step=step):
                consumed = step + 1
            case RowsAccepted():
                rows = [row for row in event.rows if holders[row.lease_id] in held_out]
                found |= {row.version.step for row in rows if row.version.step < consumed}
    return found
