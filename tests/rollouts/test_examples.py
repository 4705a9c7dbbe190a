"""The examples as they are: they learn, and go on where they were killed."""

import ast
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from april.config import ConfigError, load
from tests.run.processes import Job, assert_closed, steps_recorded, summary, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = EXAMPLES / "grpo.py"


@pytest.fixture
def train(tmp_path, config_file):
    """train(*overrides, example=GRPO, into="--checkpoint") -> Job of the example on the small configuration"""
    jobs = []

    def begin(*overrides, example=GRPO, into="--checkpoint"):
        options = [into, str(tmp_path / "saved"), "--save-every", "2", *overrides]
        jobs.append(Job([sys.executable, str(example), str(config_file), *options], tmp_path / f"log-{len(jobs)}"))
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


@pytest.mark.full
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


@pytest.mark.full
def test_trl_trains_on_behaviour_log_probabilities_and_goes_on_from_its_own_checkpoint(train, tmp_path):
    run_dir = tmp_path / "runs/small"
    trl = partial(train, "--schedule.max_steps", "7", example=EXAMPLES / "trl_grpo.py", into="--output")
    job = trl()
    wait_until((tmp_path / "saved/checkpoint-2/trainer_state.json").exists, job)
    wait_until(lambda: steps_recorded(run_dir) >= 4, job)
    job.kill("trl_grpo.py")
    wait_until(lambda: not job.descendants(), timeout_s=60)
    part = tmp_path / "saved/checkpoint-6"
    part.mkdir(exist_ok=True)
    (part / "trainer_state.json").write_text('{"global_step": 6, "log_')  # killed while it saved
    again = trl()
    assert again.wait() == 0, again.output
    found = assert_closed(run_dir)
    assert found["state"] == "finished" and found["steps"] == 7 == steps_recorded(run_dir)
    assert (tmp_path / "saved/checkpoint-7").is_dir() and not (tmp_path / "saved/checkpoint-1").exists()

    def figures(output, name):
        return [float(value) for value in re.findall(rf"'{name}': '([^']+)'", output)]

    first_apart = figures(job.output, "sampling/sampling_logp_difference/max")[0]
    assert first_apart < 1e-4, "under the weights that sampled them TRL says the same of all tokens"
    before, after = figures(job.output, "loss"), figures(again.output, "loss")
    gone_on_from = 7 - len(after)
    assert gone_on_from in (2, 4)
    assert before[gone_on_from:] == after[: len(before) - gone_on_from], "the same batches and weights"
    ratios = figures(again.output, "sampling/importance_sampling_ratio/max")
    assert max(ratios) > 1.0, "tokens of older weights are corrected"


def test_arguments_of_trl_that_do_not_fit_the_run_are_refused(config_file, tmp_path):
    adapter = pytest.importorskip("april.adapters.trl")
    fitting = {
        "num_generations": 2, "generation_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1,
        "num_iterations": 1, "max_steps": 3, "temperature": 1.0,
    }  # fmt: skip
    config = load(config_file)
    adapter.check(config, SimpleNamespace(**fitting))
    for name in ("num_generations", "generation_batch_size", "max_steps", "temperature", "num_iterations"):
        with pytest.raises(ConfigError, match=f"GRPOConfig's '{name}' = 17 does not fit the run; set it to "):
            adapter.check(config, SimpleNamespace(**fitting | {name: 17}))
