"""A checkpoint resumes bitwise, is complete or absent, and the exported policy is an ordinary model."""

import errno
import io
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from transformers import AutoModelForCausalLM

from april.learner import checkpoint, store
from april.learner.batch import TrainingBatch
from april.learner.trainer import Trainer
from april.util import files
from tests.support.learner.comparison import equal
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import flip_a_bit, full_moments, job, make_config, uneven_batch


@pytest.mark.full
def test_restored_ranks_continue_bitwise_and_their_number_may_change(policy_folder, tmp_path, one_rank):
    config = make_config(policy_folder, tmp_path / "run", microbatch_tokens=64, keep_checkpoints=2)
    batches = [uneven_batch(step, policy_folder) for step in range(4)]
    (whole,) = run_ranks(2, [job(config, batches, save_after=[1, 2, 4])], tmp_path / "whole")
    assert checkpoint.steps(config.run_dir / "checkpoints") == [2, 4]
    alone = Trainer(config, torch.device("cpu"))
    assert (alone.restore(), alone.optimizer_steps) == (4, 4)
    assert equal(alone.weights(), whole["weights"])
    for one, other in zip(whole["moments"], full_moments(alone), strict=True):
        assert equal(one, other)
    shutil.rmtree(config.run_dir / "checkpoints" / "step_000004")
    assert alone.restore() == 2
    for batch, expected, tolerance in zip(batches[2:], whole["metrics"][2:], (1e-5, 1e-3), strict=True):
        metrics = alone.step(batch)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
    alone.save()
    wider = make_config(policy_folder, tmp_path / "wider")
    shutil.copytree(alone.directory, wider.run_dir / "checkpoints")
    shutil.rmtree(alone.directory / "step_000004")
    jobs = [job(config, batches[2:], restore=True), job(wider, [], restore=True)]
    resumed, widened = run_ranks(2, jobs, tmp_path / "resumed")
    assert (resumed["restored"], resumed["optimizer_steps"]) == (2, 4)
    assert equal(whole["weights"], resumed["weights"])
    for one, other in zip(whole["moments"], resumed["moments"], strict=True):
        assert one.keys() == other.keys() == {"exp_avg", "exp_avg_sq"}
        assert equal(one, other)
    losses = [[metrics["loss"] for metrics in result["metrics"]] for result in (whole, resumed)]
    assert losses[0][2:] == losses[1]
    assert (widened["restored"], widened["optimizer_steps"]) == (4, 4)
    assert equal(alone.weights(), widened["weights"])
    for one, other in zip(full_moments(alone), widened["moments"], strict=True):
        assert equal(one, other)


@pytest.fixture
def trainer(one_rank, policy_folder, tmp_path):
    return Trainer(make_config(policy_folder, tmp_path / "run", keep_checkpoints=2), torch.device("cpu"))


def test_a_checkpoint_cut_short_anywhere_is_never_picked_up(trainer, policy_folder, monkeypatch):
    trainer.step(uneven_batch(0, policy_folder))
    trainer.save()
    assert checkpoint.latest(trainer.directory) == 1
    trainer.step(uneven_batch(1, policy_folder))
    for cut in ("store.copy_to_memory", "store.write_shards", "checkpoint.replace_folder"):
        with monkeypatch.context() as broken:
            broken.setattr(f"april.learner.{cut}", stop)
            with pytest.raises(KeyboardInterrupt):
                trainer.save()
        assert checkpoint.latest(trainer.directory) == 1
    trainer.save()
    assert checkpoint.latest(trainer.directory) == 2
    assert sorted(os.listdir(trainer.directory)) == ["step_000001", "step_000002"]


def test_a_checkpoint_that_is_written_during_later_steps_holds_the_weights_it_was_begun_with(
    trainer, policy_folder, monkeypatch
):
    trainer.step(uneven_batch(0, policy_folder))
    before, trained_on, write = trainer.weights(), threading.Event(), store.write_shards

    def write_later(*arguments, **options):
        assert trained_on.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(store, "write_shards", write_later)
    trainer.start_save()
    trainer.step(uneven_batch(1, policy_folder))
    assert trainer.saved() is None and checkpoint.latest(trainer.directory) is None
    trained_on.set()
    assert (trainer.saved(wait=True), trainer.saved()) == (1, None)
    assert trainer.restore() == 1
    assert equal(trainer.weights(), before)


@pytest.mark.parametrize(
    "file, damage",
    [
        ("__0_0.distcp", flip_a_bit),
        ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size // 2)),
        ("__0_0.distcp", os.remove),
        ("progress.json", lambda path: os.truncate(path, 0)),
        ("SHA256SUMS", lambda path: os.truncate(path, 0)),
    ],
    ids=["a flipped bit", "half a file", "a file gone", "empty progress", "empty checksums"],
)
def test_a_damaged_checkpoint_is_detected_and_the_previous_one_used(trainer, policy_folder, caplog, file, damage):
    weights = []
    for step in range(2):
        trainer.step(uneven_batch(step, policy_folder))
        trainer.save()
        weights.append(trainer.weights())
    damage(trainer.directory / "step_000002" / file)
    assert (trainer.restore(), trainer.optimizer_steps) == (1, 1)
    assert equal(trainer.weights(), weights[0])
    assert f"step_000002 is damaged ({file})" in caplog.text
    assert sorted(os.listdir(trainer.directory)) == ["step_000001", "step_000002.damaged"]


CALLS = [
    *((os, name) for name in ("fsync", "scandir", "listdir")),
    *(
        (Path, name)
        for name in (
            "open",
            "rename",
            "write_bytes",
            "write_text",
            "mkdir",
            "is_file",
            "exists",
            "is_dir",
            "glob",
            "stat",
        )
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
def test_a_single_error_in_a_checkpoint_s_file_is_tried_again(trainer, policy_folder, monkeypatch, owner, name):
    """Each call of that name that writes or restores a checkpoint fails once."""
    monkeypatch.setattr(files, "AGAIN_S", (0.0, 0.0))
    first, second = (uneven_batch(step, policy_folder) for step in range(2))
    trainer.step(first)
    weights, real, calls = trainer.weights(), getattr(owner, name), [0]

    def fails_once(*arguments, **options):
        calls[0] -= 1
        if calls[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **options)

    number = 0
    while calls[0] <= 0:
        calls[0] = number = number + 1
        with monkeypatch.context() as failing:
            failing.setattr(owner, name, fails_once)
            trainer.save()
            trainer.step(second)
            assert trainer.restore() == 1, number
        assert checkpoint.damaged_files(trainer.directory / "step_000001") == [] and equal(trainer.weights(), weights)
    assert number > 1 and os.listdir(trainer.directory) == ["step_000001"]


def test_a_file_that_cannot_be_read_for_good_is_no_file_of_a_checkpoint(trainer, policy_folder, monkeypatch):
    """It is not listed without its checksum either."""
    monkeypatch.setattr(files, "AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr("april.config.stored.hashlib.file_digest", unreadable)
    trainer.step(uneven_batch(0, policy_folder))
    with pytest.raises(OSError, match="Input/output error"):
        trainer.save()
    assert checkpoint.latest(trainer.directory) is None


def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(trainer, policy_folder, monkeypatch):
    monkeypatch.setattr(files, "AGAIN_S", (0.0, 0.0))
    trainer.step(uneven_batch(0, policy_folder))
    trainer.save()
    with monkeypatch.context() as failing:
        failing.setattr("april.config.stored.hashlib.file_digest", unreadable)
        with pytest.raises(OSError, match=r"Input/output error: '.*/step_000001/"):
            trainer.restore()
    assert trainer.restore() == 1


def unreadable(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def stop(*_, **__):
    raise KeyboardInterrupt


def test_without_a_complete_checkpoint_there_is_nothing_to_restore(trainer):
    assert checkpoint.latest(trainer.directory) is None
    (trainer.directory / "step_000007").mkdir(parents=True)
    assert checkpoint.latest(trainer.directory) is None
    assert trainer.restore() == 0


def test_a_checkpoint_from_before_the_first_update_restores(trainer):
    trainer.step(TrainingBatch(0, []))
    trainer.save()
    assert (trainer.restore(), trainer.optimizer_steps) == (1, 0)


def test_the_newest_checkpoints_are_kept_and_one_may_be_written_again(trainer):
    for step in range(1, 5):
        trainer.step_count = step
        trainer.save()
    trainer.save()
    assert checkpoint.steps(trainer.directory) == [3, 4]


def test_the_export_loads_in_transformers_with_the_same_logits(trainer, policy_folder):
    trainer.step(uneven_batch(0, policy_folder))
    trainer.export()
    trainer.export()
    folder = trainer.directory / "policy"
    exported = AutoModelForCausalLM.from_pretrained(folder)
    started_from = AutoModelForCausalLM.from_pretrained(policy_folder)
    ids = torch.arange(12)[None]
    live = AutoModelForCausalLM.from_pretrained(policy_folder)
    live.load_state_dict(trainer.weights(), strict=False)
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, live(ids).logits)
        assert not torch.allclose(exported(ids).logits, started_from(ids).logits)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(os.listdir(folder))
    assert (folder / "config.json").read_text() == (policy_folder / "config.json").read_text()
    assert os.listdir(trainer.directory) == ["policy"]


class ByGetattr:
    """Pickled as `getattr(form, name)`, as Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, form, name):
        self.form, self.name = form, name

    def __reduce__(self):
        return getattr, (self.form, self.name)


def test_a_checkpoint_s_enums_are_read_as_any_python_writes_them_and_no_attribute_of_anything_else():
    def read(written):
        return checkpoint.MetadataUnpickler(io.BytesIO(pickle.dumps(written))).load()

    for member in _MEM_FORMAT_ENCODING:
        assert read(ByGetattr(_MEM_FORMAT_ENCODING, member.name)) is read(member) is member
    for form, name in ((_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__")):
        with pytest.raises(pickle.UnpicklingError, match="which is no enum's"):
            read(ByGetattr(form, name))
