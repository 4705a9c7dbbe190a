"""A real run in turns: worker and broker are killed while a tool is at work; nothing is lost or asked amiss."""

import os

import pytest

from april.data.tokenizer import Tokenizer
from april.observe.operate import RunAddress
from tests.support.journal_checks import assert_every_answer_fits_its_turn
from tests.support.run_processes import assert_closed, wait_until

IN_TURNS = ["--environment.name", "tests.support.environments:wait_at_the_gate", "--environment.turn_ends", '[","]',
            "--environment.max_turn_tokens", "6", "--environment.timeout_s", "170"]  # fmt: skip


@pytest.mark.full
def test_killed_in_the_midst_of_a_tool_call(start_run, run_dir, policy_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GATE", str(tmp_path))
    asked = lambda: {path.name for path in tmp_path.glob("asked-*")}  # noqa: E731
    one_each = ["--worker.count", "1", "--learner.ranks", "1"]
    job = start_run(*IN_TURNS, *one_each)
    wait_until(asked, job)
    first, target = asked(), RunAddress(run_dir, None, None)

    def is_said():
        """Of the worker, of the samples that are waited for, and of who holds them up."""
        status = target.status()
        states = {sample["state"] for group in status["standing"]["groups"] for sample in group["waits_for"]}
        holding_up = status["standing"]["holding_up"]
        return status["workers"][0]["does"]["tool"] and "tool" in states and holding_up and holding_up[0]["tool"]

    wait_until(is_said, job)
    job.kill("--name worker-0")
    wait_until(lambda: asked() > first, job)
    job.kill("april.cli broker")
    wait_until(lambda: "broker ended with status" in job.output, job)
    (tmp_path / "open").touch()
    assert job.wait() == 0, job.output
    wait_until(lambda: job.descendants() == [])
    summary = assert_closed(run_dir)
    assert (summary["steps"], summary["state"], summary["starts"]["broker"]) == (3, "finished", 2)
    assert summary["tokens"]["refused"] == 0 and not summary["tokens"]["discarded"]
    workers, observed = assert_every_answer_fits_its_turn(run_dir, Tokenizer(policy_folder))
    assert len(workers) == 2 and observed > 20
    assert not [name for name in asked() if os.path.exists(f"/proc/{name.removeprefix('asked-')}")]
