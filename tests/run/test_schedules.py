"""Every schedule trains for real, from the first batch to a closed ledger."""

import orjson
import pytest

from tests.run.processes import APRIL, Job, assert_closed

SCHEDULES = {
    "sync": ["--schedule.kind", "sync", "--over-sampling-batch-size", "4"],
    "sampling_in_steps": ["--over-sampling-batch-size", "3"],
    "without_partial_rollout": ["--no-partial-rollout", "--over-sampling-batch-size", "12"],
    "overlap": ["--schedule.overlap", "--over-sampling-batch-size", "12"],
    "on_policy": ["--schedule.max_staleness", "0", "--over-sampling-batch-size", "4"],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_trains(config_file, tmp_path, name):
    longer = ["--sampling.max_response_tokens", "200", "--schedule.max_steps", "5", "--learner.checkpoint_every", "5"]
    job = Job([*APRIL, "run", str(config_file), *longer, *SCHEDULES[name]], tmp_path / "output")
    try:
        assert job.wait() == 0, job.output
    finally:
        job.end()
    run_dir = tmp_path / "runs" / "small"
    summary = assert_closed(run_dir)
    steps = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert [step["groups"] for step in steps] == [4] * 5
    discarded, oldest = summary["tokens"]["discarded"], summary["staleness"]["max"]
    if name in ("sync", "sampling_in_steps", "on_policy"):
        assert oldest == 0 and not discarded and summary["tokens"]["open"] == 0
    elif name == "without_partial_rollout":
        assert discarded["aborted"] > 0 and oldest <= 5
    elif name == "overlap":
        assert 1 <= oldest <= 5


def test_a_short_last_batch_is_trained_when_the_prompts_are_exhausted(config_file, tmp_path):
    """64 prompts once, in batches of 24: two whole ones, and 16 groups at the end."""
    once = ["--rollout-batch-size", "24", "--over-sampling-batch-size", "30", "--data.epochs", "1"]
    job = Job([*APRIL, "run", str(config_file), *once, "--schedule.max_steps", "50"], tmp_path / "output")
    try:
        assert job.wait() == 0, job.output
    finally:
        job.end()
    run_dir = tmp_path / "runs" / "small"
    summary = assert_closed(run_dir)
    steps = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert [step["groups"] for step in steps] == [24, 24, 16]
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"]
