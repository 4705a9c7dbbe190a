"""An engine that never takes an update, in a whole run: what is trained is nevertheless of the version it names."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from april.observe.report.run_folder import read_records
from tests.support.journal_checks import versions_with_true_logprobs
from tests.support.run_processes import assert_closed, both_workers_are_there, wait_until

STUCK_ENGINE = """
from april.workers.engines.embedded.engine import TorchEngine
from april.observe.report.run_folder import read_records
from april.workers.engines.embedded.entry import TorchEntry


class Stuck(TorchEngine):
    def load_weights(self, version, tensors):
        first = self.__dict__.setdefault("first", {name: tensor.clone() for name, tensor in tensors.items()})
        super().load_weights(version, first)


class Entry(TorchEntry):
    @classmethod
    def from_config(cls, config, device, name):
        return Stuck(config.model.path, slots=config.worker.slots, chunk_tokens=config.worker.chunk_tokens)
"""


@pytest.fixture
def stuck(tmp_path):
    (tmp_path / "stuck_engine.py").write_text(STUCK_ENGINE)
    return ["--worker.engine", "stuck_engine:Entry", "--learner.lr", "1e-2"]


@pytest.mark.full
def test_nothing_is_trained_that_other_weights_have_sampled(start_run, stuck, run_dir, policy_folder, gate):
    """Each worker leaves at its second try of a new version, and has it when it is started again."""
    job = start_run(*stuck, *gate.hold(0))
    wait_until(lambda: both_workers_are_there(job), job)
    gate.open()
    assert job.wait() == 0, job.output
    assert assert_closed(run_dir)["steps"] == 3
    models = {0: AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)}
    assert {0, 1, 2} <= versions_with_true_logprobs(run_dir, policy_folder, models)
    steps = read_records(run_dir / "metrics.jsonl")
    assert "wrong_weights" in {alarm["name"] for step in steps for alarm in step["alarms"]}
    logs = "".join(log.read_text() for log in run_dir.glob("logs/worker-*.log"))
    assert logs.count("april worker: the engine is not seen to hold version 0.1") == 2


@pytest.mark.full
def test_without_the_canary_the_tokens_that_are_trained_give_it_away(finish_run, stuck, run_dir):
    every_token = [
        "--algorithm.entropy_coef", "1e-3", "--worker.count", "1", "--schedule.over_sampling_batch_size", "4",
    ]  # fmt: skip
    job, _ = finish_run(*stuck, *every_token, "--weights.canary", "false", "--sampling.max_response_tokens", "64")
    steps = read_records(run_dir / "metrics.jsonl")
    raised = [any(alarm["name"] == "engine_gap" for alarm in step["alarms"]) for step in steps]
    assert raised == [False, True, True], [step["engine_gaps"] for step in steps]
    assert "with other probabilities" in job.output
