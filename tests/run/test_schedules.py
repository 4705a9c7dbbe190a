"""Every schedule trains for real, from the first batch to a closed ledger."""

import pytest

from april.broker.ledger.events import BatchConsumed, BatchDelivered, GroupOpened, Leased, RowsAccepted
from april.observe.report.run_folder import read_records
from tests.support.journal_events import events
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

ONE_RANK = ["--learner.ranks", "1"]
SCHEDULES = {
    "sync": ["--schedule.kind", "sync", "--over-sampling-batch-size", "4"],
    "sampling_in_steps": ["--over-sampling-batch-size", "3"],
    "without_partial_rollout": ["--no-partial-rollout", "--over-sampling-batch-size", "12"],
    "overlap": ["--schedule.overlap", "--over-sampling-batch-size", "12"],
    "on_policy": ["--schedule.max_staleness", "0", "--over-sampling-batch-size", "4"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_trains(finish_run, run_dir, name):
    longer = ["--sampling.max_response_tokens", "200", "--schedule.max_steps", "5", "--learner.checkpoint_every", "5"]
    _, summary = finish_run(*ONE_RANK, *longer, *SCHEDULES[name])
    steps = read_records(run_dir / "metrics.jsonl")
    assert [step["groups"] for step in steps] == [4] * 5
    discarded, oldest = summary["tokens"]["discarded"], summary["staleness"]["max"]
    if name in ("sync", "sampling_in_steps", "on_policy"):
        assert oldest == 0 and not discarded and summary["tokens"]["open"] == 0
    elif name == "without_partial_rollout":
        assert discarded["aborted"] > 0 and oldest <= 5
    elif name == "overlap":
        assert 1 <= oldest <= 5


@pytest.mark.full
def test_a_short_last_batch_is_trained_when_the_prompts_are_exhausted(finish_run, run_dir):
    """64 prompts once, in batches of 24: two whole ones, and 16 groups at the end."""
    once = ["--rollout-batch-size", "24", "--over-sampling-batch-size", "30", "--data.epochs", "1"]
    _, summary = finish_run(*ONE_RANK, *once, "--schedule.max_steps", "50")
    steps = read_records(run_dir / "metrics.jsonl")
    assert [step["groups"] for step in steps] == [24, 24, 16]
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"]


@pytest.mark.full
def test_continuous_generates_while_the_learner_trains(finish_run, run_dir):
    """Six samples in flight, through weight updates and into the next batches, with evaluation in between.

    Two slots a worker and batches of 32 samples make generation the slower side, so that updates meet samples.
    """
    settings = ["--schedule.kind", "continuous", "--schedule.in_flight", "6", "--schedule.max_staleness", "2"]
    slow = ["--rollout-batch-size", "16", "--over-sampling-batch-size", "16", "--worker.slots", "2"]
    longer = ["--sampling.max_response_tokens", "400", "--schedule.max_steps", "5", "--evaluation.every", "2"]
    job, summary = finish_run(*ONE_RANK, *settings, *slow, *longer)
    assert "plan: continuous" in job.output
    assert summary["steps"] == 5 and not summary["tokens"]["discarded"]
    assert 1 <= summary["staleness"]["max"] <= 2
    assert [entry["step"] for entry in summary["evaluation"]] == [0, 2, 4, 5]
    while_training, versions = continuous_facts(run_dir)
    assert while_training > 0
    assert max(map(len, versions.values())) > 1, "no sample went on under newer weights"


def continuous_facts(run_dir):
    """Training tokens accepted between the delivery and the consumption of a batch, and the versions in each sample."""
    evaluation, holders, versions = set(), {}, {}
    in_training = while_training = 0
    for event in events(run_dir):
        match event:
            case GroupOpened(group=group, evaluation=True):
                evaluation.add(group)
            case Leased(lease_id=lease_id, group=group, index=index):
                holders[lease_id] = (group, index)
            case BatchDelivered() | BatchConsumed():
                in_training += 1 if isinstance(event, BatchDelivered) else -1
            case RowsAccepted():
                for row in event.rows:
                    if holders[row.lease_id][0] not in evaluation:
                        versions.setdefault(holders[row.lease_id], set()).add(row.version)
                        while_training += in_training * row.tokens
    return while_training, versions


@pytest.mark.full
def test_continuous_goes_on_when_learner_broker_and_worker_are_killed(start_run, run_dir, gate):
    """The learner starts again from an older checkpoint than the weights that workers hold."""
    settings = ["--schedule.kind", "continuous", "--schedule.in_flight", "12", "--schedule.max_staleness", "2"]
    rarely = ["--learner.checkpoint_every", "3", "--schedule.max_steps", "12", "--sampling.max_response_tokens", "200"]
    job = start_run(*settings, *rarely, *gate.hold(9))
    for steps, victim in ((2, "april.learner.launch"), (5, "april.cli broker"), (7, "--name worker-0")):
        wait_until(lambda steps=steps: steps_recorded(run_dir) >= steps, job)
        job.kill(victim)
    gate.open()
    assert job.wait() == 0, job.output
    summary = assert_closed(run_dir)
    assert (summary["state"], summary["steps"]) == ("finished", 12)
    assert summary["starts"] == {"broker": 2, "learner": 2} and "worker-0 ended with status" in job.output
    assert summary["staleness"]["max"] <= 2 and not summary["tokens"]["discarded"]
