"""The best checkpoint by an evaluation is kept with the newest ones, and exported with the last."""

import os

import pytest
import torch
from safetensors.torch import load_file

from april.config.evaluation import EvaluationSection
from april.learner import checkpoint, loop
from april.learner.trainer import Trainer
from tests.support.learner.small_learner import Judge, best_step, make_config


@pytest.fixture
def live(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", checkpoint_every=100, keep_checkpoints=1)
    config = config.model_copy(update={"evaluation": EvaluationSection(every=1, best="heldout")})

    def run(last_step, best=best_step):
        diary = Judge(policy_folder, last_step, best=best)
        diary.directory = config.run_dir / "checkpoints"
        trainer = Trainer(config, torch.device("cpu"))
        loop.run(config, trainer, diary, diary)
        return diary, trainer

    return run


def test_the_best_and_undecided_checkpoints_are_kept_and_the_best_is_exported(live):
    diary, _ = live(6)
    assert diary.kept == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 6]]
    assert checkpoint.steps(diary.directory) == [4, 6]
    assert diary.durables[-1] == ("durable", 6, 6), "a learner never goes back to the best"
    exported = {name: load_file(diary.directory / name / "model.safetensors") for name in ("best", "policy")}
    of_steps = {step: tensors for (_, step), tensors in diary.weights.items()}
    for name, step in (("best", 4), ("policy", 6)):
        assert all(torch.equal(value, of_steps[step][key]) for key, value in exported[name].items()), name


def test_a_restarted_learner_keeps_the_best_from_before(live):
    live(3)
    diary, _ = live(5, best=lambda last: (2, []))
    assert diary.kept == [[2, 4], [2, 5]]
    assert (diary.directory / "best").is_dir()


def test_weights_without_a_checkpoint_are_not_exported(live, caplog):
    diary, _ = live(2, best=lambda last: (1, []) if last == 2 else (-1, []))
    assert "the best weights are of step 1, whose checkpoint is not whole" in caplog.text
    assert sorted(os.listdir(diary.directory)) == ["policy", "step_000002"]
