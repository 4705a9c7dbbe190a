"""A run of an adapter sends that alone: whoever comes later, or again, samples from the model with the newest."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from april.observe.report.run_folder import read_records
from tests.support.run_processes import assert_closed, steps_recorded, wait_until


@pytest.mark.full
def test_killed_worker_and_learner_go_on_with_the_adapter_and_what_is_trained_is_of_it(
    start_run, run_dir, policy_folder, gate
):
    lora = ["--lora.rank", "4", "--lora.embedding", "true", "--learner.lr", "1e-2", "--schedule.max_steps", "5"]
    job = start_run(*lora, *gate.hold(2))
    wait_until(lambda: steps_recorded(run_dir) == 2, job)
    wait_until(lambda: all("is proven" in (run_dir / f"logs/worker-{index}.log").read_text() for index in (0, 1)), job)
    job.kill("--name worker-0")
    job.kill("-u -m april.learner")
    wait_until(lambda: "worker-0 ended" in job.output and "learner ended" in job.output, job)
    gate.open()
    assert job.wait() == 0, job.output
    assert assert_closed(run_dir)["steps"] == 5
    steps = read_records(run_dir / "metrics.jsonl")
    fresh = [gap["mean"] for step in steps for gap in step["engine_gaps"].values() if gap["age"] == 0]
    assert fresh and max(fresh) < 1e-4, "the engines sample from what the learner trains"
    started, exported = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (policy_folder, run_dir / "checkpoints/policy")
    )
    assert not all(torch.equal(value, started[name]) for name, value in exported.items())
    trained = load_file(run_dir / "checkpoints/adapter/adapter_model.safetensors")
    own = sum(value.nbytes for name, value in trained.items() if "lm_head" not in name)  # peft has the head, too
    assert {step["learner"]["publish_bytes"] for step in steps if "publish_bytes" in step["learner"]} == {own}
    assert "is sent all weights" not in "".join(log.read_text() for log in run_dir.glob("logs/learner*.log"))
