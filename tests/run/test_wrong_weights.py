"""An engine that never takes an update, in a whole run: what is trained is nevertheless of the version it names."""

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.test_main_job import versions_with_true_logprobs

STUCK_ENGINE = """
from april.workers.engines.embedded.engine import TorchEngine
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


@pytest.mark.full
def test_nothing_is_trained_that_other_weights_have_sampled(finish_run, tmp_path, run_dir, policy_folder):
    """Each worker leaves at its second try of a new version, and has it when it is started again."""
    (tmp_path / "stuck_engine.py").write_text(STUCK_ENGINE)
    _, summary = finish_run("--worker.engine", "stuck_engine:Entry", "--learner.lr", "1e-2")
    assert summary["steps"] == 3
    models = {0: AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)}
    assert {0, 1, 2} <= versions_with_true_logprobs(run_dir, policy_folder, models)
    steps = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert "wrong_weights" in {alarm["name"] for step in steps for alarm in step["alarms"]}
    logs = "".join(log.read_text() for log in run_dir.glob("logs/worker-*.log"))
    assert logs.count("april worker: the engine is not seen to hold version 0.1") == 2
