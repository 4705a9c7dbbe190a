"""A run whose policy is its own teacher with feedback: what a verifier said trains, and outlives killed processes."""

import pytest

from april.observe.report.run_folder import read_records
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

parquet = pytest.importorskip("pyarrow.parquet")

COLUMNS = ["index", "feedback", "learner_logprobs"]
VERIFIER = """
def told(response, label, finish_reason):
    right = response.endswith("#" + label)
    return float(right), {} if right else {"feedback": f"{label}+{len(response)}"}
"""


@pytest.mark.full
def test_feedback_outlives_a_killed_broker_and_is_trained_again_bit_by_bit(start_run, run_dir, config_file, gate):
    """The learner is killed, too, and goes on from the beginning."""
    (config_file.parent / "told_in_a_run.py").write_text(VERIFIER)
    taught = ["--algorithm.divergence", "forward_kl", "--algorithm.hint", "{prompt}{feedback}={label}"]
    taught += ["--learner.checkpoint_every", "3", "--learner.ranks", "2", "--reward.name", "told_in_a_run:told"]
    job = start_run(*taught, *gate.hold(2))
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and steps_recorded(run_dir) >= 2, job)
    files = [run_dir / f"samples/step_00000{step}.parquet" for step in (1, 2)]
    wait_until(lambda: all(file.exists() for file in files), job)
    before = [parquet.read_table(file, columns=COLUMNS).to_pylist() for file in files]
    written = [file.stat().st_mtime_ns for file in files]
    job.kill("april.cli broker")
    job.kill("april.learner.launch")
    gate.open()
    assert job.wait() == 0, job.output
    summary = assert_closed(run_dir)
    assert summary["steps"] == 3 and summary["starts"] == {"broker": 2, "learner": 2}
    assert summary["replays"]["different"] == 0 and summary["replays"]["same"] >= 2
    assert all(file.stat().st_mtime_ns > old for file, old in zip(files, written, strict=True)), "trained again"
    assert [parquet.read_table(file, columns=COLUMNS).to_pylist() for file in files] == before
    for step, record in enumerate(read_records(run_dir / "metrics.jsonl"), 1):
        learner = record["learner"]
        rows = parquet.read_table(run_dir / f"samples/step_{step:06d}.parquet").to_pylist()
        rows = [row for row in rows if not (row["held_out"] or row["discarded"])]
        assert learner["hinted_share"] == sum(row["reward"] == 0 for row in rows) / len(rows) > 0
        assert learner["teacher_divergence"] > 0
        for row in rows:
            assert row["feedback"] == (None if row["reward"] else f"{row['label']}+{len(row['response'])}")
