"""The examples as they are: they learn, and go on where they were killed."""

import ast
import sys
from pathlib import Path

import pytest

from tests.run.processes import Job, assert_closed, steps_recorded, summary, wait_until

GRPO = Path(__file__).parents[2] / "examples/grpo.py"


@pytest.fixture
def train(tmp_path, config_file):
    """train(*overrides) -> Job of the example on the small configuration"""
    jobs = []

    def begin(*overrides):
        options = ["--checkpoint", str(tmp_path / "grpo.pt"), "--save-every", "2", *overrides]
        jobs.append(Job([sys.executable, str(GRPO), str(config_file), *options], tmp_path / f"log-{len(jobs)}"))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def test_it_is_short_and_imports_the_public_interface_torch_and_transformers_alone():
    text = GRPO.read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - sys.stdlib_module_names == {"april", "torch", "transformers"}
    assert "from april" not in text and "april." in text and text.count("\n") < 150


def test_it_trains_all_steps_and_the_run_ends_with_it(train, tmp_path):
    job = train("--schedule.max_steps", "2")
    assert job.wait() == 0, job.output
    assert assert_closed(tmp_path / "runs/small")["state"] == "finished"
    assert summary(tmp_path / "runs/small")["steps"] == 2 and not job.descendants()


@pytest.mark.full
def test_killed_it_trains_again_what_was_not_durable_and_nothing_else(train, tmp_path):
    run_dir, steps = tmp_path / "runs/small", ("--schedule.max_steps", "9")
    job = train(*steps)
    wait_until(lambda: steps_recorded(run_dir) >= 3, job)
    job.kill("grpo.py")
    wait_until(lambda: not job.descendants(), timeout_s=60)
    done = steps_recorded(run_dir)
    again = train(*steps)
    assert again.wait() == 0, again.output
    lines = [line for line in again.output.splitlines() if line.startswith("step")]
    first = int(lines[0].removeprefix("step ").partition(":")[0])
    assert first % 2 == 1 and 3 <= first <= done + 1, "behind the newest checkpoint"
    found = assert_closed(run_dir)
    assert found["state"] == "finished" and found["steps"] == 9 == steps_recorded(run_dir)
    assert found["replays"]["different"] == 0
    assert found["replays"]["same"] >= done + 1 - first
