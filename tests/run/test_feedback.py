"""A run whose policy is its own teacher with feedback: what a verifier said trains, and outlives killed processes."""

import pytest

from april.observe.report.run_folder import read_records
from tests.support.trained_again import assert_trained_again_bit_by_bit

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
    assert_trained_again_bit_by_bit(job, run_dir, gate, COLUMNS)
    for step, record in enumerate(read_records(run_dir / "metrics.jsonl"), 1):
        learner = record["learner"]
        rows = parquet.read_table(run_dir / f"samples/step_{step:06d}.parquet").to_pylist()
        rows = [row for row in rows if not (row["held_out"] or row["discarded"])]
        assert learner["hinted_share"] == sum(row["reward"] == 0 for row in rows) / len(rows) > 0
        assert learner["teacher_divergence"] > 0
        for row in rows:
            assert row["feedback"] == (None if row["reward"] else f"{row['label']}+{len(row['response'])}")
