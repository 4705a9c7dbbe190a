"""A whole run whose learner is Megatron's, on two ranks that share every layer."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from april.observe.report.run_folder import read_records
from tests.support.run_processes import assert_closed
from tests.support.small_run import make_policy, make_prompts, write_config

PYTHON = Path(__file__).parents[3] / ".venv-megatron/bin/python"

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]


def test_a_run_trains_and_its_engine_samples_from_what_two_ranks_have_together(start, run_dir, tmp_path):
    policy = make_policy(tmp_path / "policy", hidden_size=128)
    file = write_config(tmp_path, policy, make_prompts(tmp_path))
    where = ["--learner.backend", "megatron", "--learner.ranks", "2", "--learner.tensor_parallel", "2"]
    where += ["--algorithm.entropy_coef", "0.001"]  # by which every token has a gradient, whatever its reward
    job = start("output", [str(PYTHON), "-m", "april.cli", "run", str(file), *where])
    assert job.wait(timeout_s=400) == 0, job.output
    assert assert_closed(run_dir)["steps"] == 3
    steps = read_records(run_dir / "metrics.jsonl")
    assert all(step["learner"]["grad_norm"] > 0 for step in steps)
    assert not any(step["learner"]["publish_wrong"] for step in steps), "an engine did not hold what it was sent"
    gaps = [gap for step in steps for gap in step["engine_gaps"].values() if gap["age"] == 0]
    assert gaps and max(gap["largest"] for gap in gaps) < 1e-3
    files = (run_dir / "checkpoints/policy").glob("model*.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    before = load_file(policy / "model.safetensors")
    assert written.keys() == before.keys() and any((written[name] != before[name]).any() for name in written)
    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints/policy")
