"""A run with a teacher: its token scores outlive a killed scorer, train the policy, and are kept with the samples."""

import pytest

from april.broker.ledger.events import TokensScored
from april.observe.report.run_folder import read_records
from tests.support.journal_events import events
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.full
def test_a_teacher_scores_every_trained_token_though_its_scorer_is_killed(
    start_run, run_dir, config_file, policy_folder, gate
):
    with config_file.open("a") as file:
        file.write(f'\n[teacher.big]\npath = "{policy_folder}"\n')
    distil = ["--algorithm.advantage", "no_reward", "--algorithm.distillation", "reverse_kl"]
    job = start_run("--reward.where", "scorer", "--learner.ranks", "2", *distil, *gate.hold(1))
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and steps_recorded(run_dir), job)
    job.kill("--name scorer-0")
    gate.open()
    assert job.wait() == 0, job.output
    assert assert_closed(run_dir)["steps"] == 3
    assert "scorer-0 ended with status -9; restart 1 of 3" in job.output
    assert any(isinstance(event, TokensScored) for event in events(run_dir))
    for record in read_records(run_dir / "metrics.jsonl"):
        assert abs(record["learner"]["teacher_kl"]) < 1.0, "the teacher is the policy at the start"
    rows = parquet.read_table(run_dir / "samples/step_000001.parquet").to_pylist()
    trained = [row for row in rows if row["trained"]]
    assert trained and all(row["token_scores"][0]["name"] == "big" for row in trained)
    for row in trained:
        gaps = [a - b for a, b in zip(row["token_scores"][0]["values"], row["behaviour_logprobs"], strict=True)]
        assert max(map(abs, gaps)) < 0.05, "of the very tokens, by the very weights that sampled them"
