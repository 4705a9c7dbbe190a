"""Checkpoints in an object store: complete before they are reported, and found after all disks are lost."""

import os
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from april import cli
from april.config import ConfigError
from april.config.evaluation import EvaluationSection
from april.config.stored import CHECKSUMS_FILE, StoredCheckpoints, digest_of, folder_of, stored_checkpoints
from april.learner import checkpoint, loop
from april.learner.checkpoint_copies import NeighbourDiskCopies, ObjectStoreCopies
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import Judge, best_step, flip_a_bit, job, make_config, run_of, uneven_batch
from tests.support.object_stores import KINDS

GRACE_S = 3
"""Seconds to wait for something that must not happen while a file is being uploaded."""


@pytest.fixture
def config(one_rank, policy_folder, tmp_path, store_url):
    return make_config(policy_folder, tmp_path / "run", keep_checkpoints=2, checkpoint_store=store_url)


@pytest.fixture
def trainer(config):
    return Trainer(config, torch.device("cpu"))


def trained(trainer, steps):
    """Weights after each of so many further steps, of which each has a checkpoint, and what was told of it."""
    weights, losses = [], []
    for _ in range(steps):
        losses.append(trainer.step(uneven_batch(trainer.step_count, trainer.config.model.path))["loss"])
        trainer.save()
        weights.append(trainer.weights())
    return weights, losses


@pytest.mark.full
def test_training_resumes_bitwise_after_all_disks_are_lost(config, trainer):
    weights, losses = trained(trainer, 4)
    stored = stored_checkpoints(config)
    assert stored.steps() == {3, 4} == set(checkpoint.steps(trainer.directory))
    assert {name.partition("/")[2] for name in stored.objects.names()} == {
        ".metadata", "__0_0.distcp", "progress.json", CHECKSUMS_FILE,
    }  # fmt: skip
    shutil.rmtree(config.run_dir)
    stored.set_aside(4, "elsewhere")
    other = Trainer(config, torch.device("cpu"))
    assert (other.restore(), other.optimizer_steps) == (3, 3) and equal(other.weights(), weights[2])
    assert checkpoint.damaged_files(checkpoint.folder(other.directory, 3)) == []
    assert trained(other, 1)[1] == losses[3:] and equal(other.weights(), weights[3])
    assert stored.steps() == {3, 4}


@pytest.mark.full
def test_a_checkpoint_is_not_durable_before_its_last_file_is_stored(trainer, monkeypatch):
    copies, came, may = trainer.checkpoints.copies, [], threading.Event()
    stored, put = copies.stored, copies.stored.objects.put

    def put_when_it_may(path, name):
        came.append(name)
        assert may.wait(60)
        put(path, name)

    monkeypatch.setattr(stored.objects, "put", put_when_it_may)
    trainer.step(uneven_batch(0, trainer.config.model.path))
    trainer.start_save()
    while not came:
        assert trainer.saved() is None
    may.wait(GRACE_S)
    assert trainer.saved() is None and stored.steps() == set() and checkpoint.latest(trainer.directory) is None
    may.set()
    assert trainer.saved(wait=True) == 1 and stored.steps() == {1}


def test_a_checkpoint_is_not_complete_before_every_rank_has_uploaded_its_files(objects, tmp_path):
    stored, meeting, put = StoredCheckpoints(objects), threading.Barrier(2), threading.Event()
    names = [["__0_0.distcp"], ["__1_0.distcp"]]
    for (name,) in names:
        (tmp_path / name).write_text(name)
    sums = {name: digest_of(tmp_path / name) for (name,) in names}

    barrier = partial(meeting.wait, 60)
    copies = [
        ObjectStoreCopies(stored, SimpleNamespace(rank=number, is_leader=True, barrier=barrier)) for number in range(2)
    ]

    def rank(number):
        if number == 1:
            assert put.wait(60)
        copies[number].add(7, tmp_path, names, sums)

    ranks = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for one in ranks:
        one.start()
    while not meeting.n_waiting:
        assert stored.steps() == set()
    assert stored.steps() == set() and objects.names() == {f"{folder_of(7, sums)}/__0_0.distcp"}
    put.set()
    for one in ranks:
        one.join(60)
    assert stored.steps() == {7} and stored.checkpoint_sums(7) == [sums]


def test_an_interrupted_upload_is_no_checkpoint_and_is_removed_with_the_next(trainer, monkeypatch):
    trained(trainer, 1)
    stored = trainer.checkpoints.copies.stored
    with monkeypatch.context() as broken:
        broken.setattr(stored, "complete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        trainer.step(uneven_batch(1, trainer.config.model.path))
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    torn = {name for name in stored.objects.names() if name.startswith("step_000002")}
    assert len(torn) == 3 and stored.steps() == {1} and checkpoint.latest(trainer.directory) == 1
    shutil.rmtree(trainer.directory)
    assert trainer.restore() == 1
    trainer.step_count = 3
    trainer.save()
    assert stored.steps() == {1, 3} and not torn & stored.objects.names()


@pytest.mark.full
@pytest.mark.parametrize("what", ["__0_0.distcp", "progress.json", CHECKSUMS_FILE])
def test_a_damaged_file_in_the_store_is_detected_and_the_previous_checkpoint_used(trainer, tmp_path, caplog, what):
    weights, _ = trained(trainer, 2)
    stored = trainer.checkpoints.copies.stored
    (name,) = (name for name in stored.objects.names() if name.startswith("step_000002") and name.endswith(what))
    stored.objects.fetch(name, tmp_path / "file")
    flip_a_bit(tmp_path / "file")
    stored.objects.put(tmp_path / "file", name)
    shutil.rmtree(trainer.directory)
    assert trainer.restore() == 1 and equal(trainer.weights(), weights[0])
    assert f"{stored.url}/{name} is damaged" in caplog.text and "and set aside" in caplog.text
    assert stored.steps() == {1} and f"{name.partition('/')[0]}/{CHECKSUMS_FILE}.damaged" in stored.objects.names()
    trainer.step_count = 2
    trained(trainer, 3)
    assert stored.steps() == {4, 5}
    assert f"{name.partition('/')[0]}/{CHECKSUMS_FILE}.damaged" in stored.objects.names(), "to be looked at"


def test_only_files_missing_or_damaged_on_disk_are_fetched(trainer, monkeypatch, caplog):
    weights, _ = trained(trainer, 2)
    fetched, stored = [], trainer.checkpoints.copies.stored
    fetch = stored.objects.fetch
    monkeypatch.setattr(stored.objects, "fetch", lambda name, path: (fetched.append(name), fetch(name, path)))
    assert trainer.restore() == 2 and fetched == []
    flip_a_bit(trainer.directory / "step_000002/__0_0.distcp")
    assert trainer.restore() == 2 and equal(trainer.weights(), weights[1])
    assert [name.partition("/")[2] for name in fetched] == ["__0_0.distcp"]


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
def test_ranks_resume_bitwise_with_files_from_disks_and_the_rest_from_the_store(policy_folder, tmp_path, request, kind):
    url = request.getfixturevalue("s3") if kind == "s3" else f"file://{tmp_path}/store"
    config = make_config(policy_folder, tmp_path / "run", checkpoint_store=url)
    batches = [uneven_batch(step, policy_folder) for step in range(3)]
    again = {"batches": batches[2:], "restore": True}
    jobs = [
        job(config, batches, save_after=[2], disks=[0, 1, 2]),
        job(config, **again, disks=[3, 0, 1], flip_in=["disk_1/run/checkpoints/step_000002/__1_0.distcp"]),
        job(config, **again, disks=[4, 4, 5], without=["disk_2", "disk_3"]),
        job(config, **again, disks=[0, 4, 1], save_after=[3]),
        job(config, batches[2:2], disks=[6, 6, 6], restore=True),
    ]
    unharmed, *results = run_ranks(3, jobs, tmp_path / "ranks")
    assert [result["restored"] for result in results] == [2, 2, 2, 3]
    for result in results:
        assert equal(result["weights"], unharmed["weights"])
    assert [result["metrics"][0]["loss"] for result in results[:3]] == [unharmed["metrics"][2]["loss"]] * 3
    held = {path.name for path in (tmp_path / "disk_4/run/checkpoints/step_000003").glob("__*")}
    assert held == {"__1_0.distcp"}, "what is in the store goes to no other disk"
    assert stored_checkpoints(config).steps() == {2, 3}


@pytest.mark.full
def test_checkpoints_of_a_run_begun_without_a_store_are_uploaded(config, policy_folder):
    plain = make_config(policy_folder, config.run_dir, keep_checkpoints=2)
    before = Trainer(plain, torch.device("cpu"))
    assert isinstance(before.checkpoints.copies, NeighbourDiskCopies)
    weights, _ = trained(before, 2)
    trainer, stored = Trainer(config, torch.device("cpu")), stored_checkpoints(config)
    assert stored.steps() == set() and trainer.restore() == 2
    assert stored.steps() == {2}
    shutil.rmtree(config.run_dir)
    assert trainer.restore() == 2 and equal(trainer.weights(), weights[1])


def test_a_learner_whose_machine_cannot_use_the_store_refuses_to_start(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", checkpoint_store="none-such://bucket")
    with pytest.raises(ConfigError, match=r"'learner\.checkpoint_store': none-such://bucket/run/"):
        Trainer(config, torch.device("cpu"))


@pytest.mark.full
def test_the_store_keeps_the_best_checkpoint_and_complete_exports(config, policy_folder):
    evaluation = {"evaluation": EvaluationSection(every=1, best="heldout")}
    learner = config.learner.model_copy(update={"checkpoint_every": 100, "keep_checkpoints": 1})
    config = config.model_copy(update=evaluation | {"learner": learner})
    stored, kept = stored_checkpoints(config), []

    class Keeper(Judge):
        def durable(self, step, oldest):
            super().durable(step, oldest)
            kept.append(sorted(stored.steps()))
            if step == 5:
                shutil.rmtree(checkpoint.folder(self.directory, 4))

    diary = Keeper(policy_folder, 6, best=best_step)
    diary.directory = config.run_dir / "checkpoints"
    stored.objects.write("policy/of-a-run-before", b"")
    trainer = Trainer(config, torch.device("cpu"))
    trainer.checkpoints.copies.stored.objects.retries = 3
    loop.run(config, trainer, diary, diary)
    assert diary.metrics[-1]["checkpoint_store_retries"] == 3
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 6]] and stored.steps() == {4, 6}
    of_steps = {step: tensors for (_, step), tensors in diary.weights.items()}
    for name, step in (("best", 4), ("policy", 6)):
        folder = diary.directory / name
        assert equal(load_file(folder / "model.safetensors"), of_steps[step]), name
        there = {path.name for path in folder.iterdir()} | {CHECKSUMS_FILE}
        assert {found.partition("/")[2] for found in stored.objects.names() if found.startswith(f"{name}/")} == there
        listed = stored.objects.read(f"{name}/{CHECKSUMS_FILE}").decode()
        assert f"{digest_of(folder / 'model.safetensors')}  model.safetensors\n" in listed


def test_convert_weights_fetches_checkpoints_that_only_the_store_has(config, tmp_path, capsys):
    if config.learner.checkpoint_store.startswith("memory"):
        config = config.model_copy(
            update={"learner": config.learner.model_copy(update={"checkpoint_store": f"file://{tmp_path}/another"})}
        )
    run_dir, trainer = run_of(config), Trainer(config, torch.device("cpu"))
    trained(trainer, 2)
    trainer.write_model(tmp_path / "expected")
    shutil.rmtree(run_dir / "checkpoints")
    assert cli.main(["convert-weights", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    assert "step 2 is in" in capsys.readouterr().out
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob("*.partial"))
    stored = stored_checkpoints(config)
    (name,) = (name for name in stored.objects.names() if name.startswith("step_000002") and name.endswith(".distcp"))
    stored.objects.write(name, b"other bytes")
    assert cli.main(["convert-weights", str(run_dir), "--out", str(tmp_path / "none")]) == cli.REFUSED
    assert f"checkpoint 2 of {stored.url} is damaged; take another with --step" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "expected"))
