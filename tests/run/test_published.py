"""The published configurations with a tiny model and tiny budgets: each file of each folder trains a step on a CPU."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from april.observe.report.run_folder import read_records
from tests.support.dataset_records import RECORDS
from tests.support.marks import full
from tests.support.run_processes import APRIL, assert_closed

FOLDER = Path(__file__).parents[2] / "configs" / "published"
TWINS = [
    ("qwen3-4b", "dapo-math-17k", "grpo", "sync"),
    ("qwen3-8b", "deepscaler", "dapo", "april"),
    ("deepseek-r1-distill-qwen-1.5b", "deepmath-103k", "gspo", "continuous"),
]
"""every model, dataset, algorithm and schedule once; that all combinations resolve is tested without running them"""
MAPPINGS = {"dapo-math-17k": "dapo_math", "deepscaler": "deepscaler", "deepmath-103k": "deepmath"}
TINY = {
    "worker.device": "cpu", "worker.count": 1, "worker.slots": 8, "learner.device": "cpu", "learner.ranks": 1,
    "rollout-batch-size": 4, "n-samples-per-prompt": 2, "sampling.max_response_tokens": 24, "schedule.max_steps": 1,
    "data.max_prompt_tokens": 300, "evaluation.prompts": 2, "reward.processes": 1, "data.epochs": 50,
}  # fmt: skip
SIZES = {"sync": {}, "april": {"over-sampling-batch-size": 8}, "continuous": {"schedule.in_flight": 16}}


@pytest.mark.parametrize("twin", [full(TWINS[0]), TWINS[1], full(TWINS[2])], ids="-".join)
def test_a_tiny_twin_trains_a_step(twin, start, policy_folder, tmp_path, monkeypatch):
    model, data, algorithm, schedule = twin
    (tmp_path / "parity.py").write_text("def odd(response, label, finish_reason): return float(len(response) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    for name, mapping in (("train", MAPPINGS[data]), ("aime", "aime")):
        parquet.write_table(pa.Table.from_pylist([RECORDS[mapping]] * 8), tmp_path / f"{name}.parquet")
    named = (("models", model), ("data", data), ("algorithms", algorithm), ("schedules", schedule))
    files = [FOLDER / "base.toml", *(FOLDER / part / f"{name}.toml" for part, name in named)]
    places = {"model.path": policy_folder, "data.path": tmp_path / "train.parquet", "run.dir": tmp_path / "runs"}
    keys = TINY | SIZES[schedule] | places | {"data.eval_path": tmp_path / "aime.parquet"}
    keys |= {"data.reward": "parity:odd"} if algorithm == "dapo" else {}
    overrides = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    job = start("output", [*APRIL, "run", *map(str, files), *overrides])
    assert job.wait() == 0, job.output
    run_dir = tmp_path / "runs" / "-".join(twin)
    summary = assert_closed(run_dir)
    assert (summary["state"], summary["steps"]) == ("finished", 1)
    assert [entry["prompts"] for entry in summary["evaluation"]] == [2, 2]
    step = read_records(run_dir / "metrics.jsonl")[0]
    assert step["groups"] == 4 and step["samples"] == 8
    if algorithm == "dapo":
        assert 0 < step["reward"] < 1, "only groups with spread are trained"
    else:
        assert set(step["reward_details"]) == {"boxed", "closed", "correct", "over_limit"}
