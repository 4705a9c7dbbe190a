"""TensorBoard's event files have the values of metrics.jsonl."""

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from april.observe.report.run_folder import read_records
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, make_batch


def test_steps_and_evaluations_become_scalars(converse):
    options = ["--evaluation.prompts", "1", "--operations.sinks", '["tensorboard"]']
    talk = converse(*options)
    worker, learner = joined(FakeWorker(talk)), joined(FakeLearner(talk))
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0, version_share_0=1.0)
    line = read_records(talk.config.run_dir / "metrics.jsonl")[0]
    (file,) = (talk.config.run_dir / "tensorboard").iterdir()
    found = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found[1, "reward"] == pytest.approx(line["reward"])
    assert found[1, "learner/loss"] == line["learner"]["loss"] == 0.5
    assert found[1, "tokens_ledger/generated"] == line["tokens_ledger"]["generated"]
    assert "version_share_0" in line["learner"] and not any("version_share" in tag for _, tag in found)
    assert found[0, "evaluation/pass_at_k/1/value"] == 1.0
