"""A run with a teacher: its token scores outlive killed processes, train the policy, and are kept with the samples."""

import numpy as np
import pytest

from april.broker.ledger.events import AgentClosed, TokensScored
from april.broker.payloads import split_columns
from april.data.tokenizer import Tokenizer
from april.observe.report.run_folder import read_records
from tests.support.agent_programs import AGENT
from tests.support.journal_events import events, events_and_arrays
from tests.support.run_processes import assert_closed, steps_recorded, wait_until
from tests.support.teacher_servers import RandomTeacher, serving
from tests.support.trained_again import assert_trained_again_bit_by_bit

parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.full
def test_a_teacher_scores_every_trained_token_though_its_scorer_is_killed(
    start_run, run_dir, config_file, policy_folder, gate
):
    with config_file.open("a") as file:
        file.write(f'\n[teacher.big]\npath = "{policy_folder}"\n')
    distil = ["--algorithm.advantage", "no_reward", "--algorithm.distillation", "reverse_kl"]
    distil += ["--schedule.n_samples_per_prompt", "1"]
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
        assert record["learner"]["gradient_groups"] == 4 and record["gradient"]["tokens"] == 1, "each group of one"
    rows = parquet.read_table(run_dir / "samples/step_000001.parquet").to_pylist()
    trained = [row for row in rows if row["trained"]]
    assert trained and all(row["token_scores"][0]["name"] == "big" for row in trained)
    for row in trained:
        gaps = [a - b for a, b in zip(row["token_scores"][0]["values"], row["behaviour_logprobs"], strict=True)]
        assert max(map(abs, gaps)) < 0.05, "of the very tokens, by the very weights that sampled them"


@pytest.mark.full
def test_a_teacher_scores_every_fork_of_an_agent_s_session_though_broker_and_scorer_are_killed(
    start_run, run_dir, config_file, policy_folder, gate, tmp_path, monkeypatch
):
    monkeypatch.setenv("READ_BY_AGENTS", str(tmp_path))
    with config_file.open("a") as file:
        file.write(f'\n[teacher.big]\npath = "{policy_folder}"\n')
    program = ["--agent.program", "tests.support.agent_programs:with_branches", "--worker.count", "1"]
    distil = ["--algorithm.advantage", "grpo", "--algorithm.distillation", "reverse_kl", "--reward.where", "scorer"]
    job = start_run(*AGENT, *program, *distil, "--learner.ranks", "1", *gate.hold(1))
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and steps_recorded(run_dir), job)
    job.kill("april.cli broker")
    job.kill("--name scorer-0")
    gate.open()
    assert job.wait() == 0, job.output
    summary = assert_closed(run_dir)
    assert summary["steps"] == 3 and not {"agent_failed", "superseded"} & summary["tokens"]["discarded"].keys()
    said = {event.said[0] for event in events(run_dir) if isinstance(event, AgentClosed)}
    assert said == {0.0, 1.0}, "the program's reward, which waits for the teacher"
    rows = parquet.read_table(run_dir / "samples/step_000001.parquet").to_pylist()
    trained = [row for row in rows if row["trained"]]
    assert {row["fork"] for row in trained} == {0, 1, 2, 3, 4} and {row["reward"] for row in trained} <= said
    for row in trained:
        (scores,) = row["token_scores"]
        pairs = zip(scores["values"], row["behaviour_logprobs"], strict=True)
        gaps = [told - own for told, own in pairs if own is not None]
        assert scores["name"] == "big" and max(map(abs, gaps)) < 0.05, "of the very tokens, after the very context"


@pytest.mark.full
def test_a_server_s_top_k_outlives_a_killed_broker_and_is_trained_again_bit_by_bit(
    start_run, run_dir, config_file, policy_folder, gate
):
    """The learner is killed, too, and goes on from the beginning. A lie of the server is an attempt that failed."""
    teacher = RandomTeacher(len(Tokenizer(policy_folder).inner))
    with serving(teacher) as url:
        with config_file.open("a") as file:
            keys = f'kind = "sglang"\nurl = "{url}"\npath = "{policy_folder}"\ntop_k = 3'
            file.write(f"\n[teacher.big]\n{keys}\n")
        distil = ["--algorithm.advantage", "no_reward", "--algorithm.divergence", "forward_kl"]
        distil += ["--learner.checkpoint_every", "3", "--learner.ranks", "1"]
        job = start_run("--reward.where", "scorer", *distil, *gate.hold(2))
        assert_trained_again_bit_by_bit(job, run_dir, gate, ["index", "learner_logprobs"])
    failed = [event for event in events(run_dir) if getattr(event, "cause", "") == "scoring_failed"]
    assert [event.error for event in failed if "named an id twice" in event.error], "and the sample was scored again"
    told = [
        np.frombuffer(columns["big/top_k"], np.float32).reshape(-1, 3, 2)
        for event, arrays in events_and_arrays(run_dir)
        if isinstance(event, TokensScored)
        for columns in split_columns(event.columns, memoryview(arrays[0][1]))
    ]
    assert told and all(len(np.unique(pairs[..., 0])) > 3 for pairs in told if len(pairs) > 3)
    masses = [record["learner"]["teacher_top_k_mass"] for record in read_records(run_dir / "metrics.jsonl")]
    expected = np.exp(np.concatenate(told)[..., 1]).sum(-1).mean()
    assert masses == pytest.approx([expected] * 3, rel=0.1)
    assert all(record["learner"]["teacher_divergence"] > 0 for record in read_records(run_dir / "metrics.jsonl"))
