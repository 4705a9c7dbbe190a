"""The learner's main loop against an in-memory source and publisher: order of reports, replay, restart, end."""

import shutil
import threading
import time

import numpy as np
import pytest
import torch

from april.learner import checkpoint, loop
from april.learner.batch import TrainingBatch, decode
from april.learner.trainer import Trainer
from april.wire.message import Version
from tests.support.learner.comparison import equal
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import Diary, job, make_config, poisoned


@pytest.fixture
def live(one_rank, policy_folder, tmp_path):
    """Run the learner in the same run folder up to `last_step`; returns its diary."""

    def run(last_step, **answers):
        config = make_config(policy_folder, tmp_path / "run", checkpoint_every=2, keep_checkpoints=9)
        diary = Diary(policy_folder, last_step, **answers)
        loop.run(config, Trainer(config, torch.device("cpu")), diary, diary)
        return diary

    run.directory = tmp_path / "run" / "checkpoints"
    return run


def test_a_fresh_run_publishes_at_once_then_reports_each_batch_before_its_weights(live):
    diary = live(3)
    reported = [each for step in range(3) for each in (("consumed", step), ("publish", Version(0, step + 1)))]
    assert diary.in_order == [("start", 0), ("publish", Version(0, 0)), *reported]
    assert diary.durables == [("durable", 2, 0), ("durable", 3, 0)]
    assert diary.events.index(("durable", 2, 0)) > diary.events.index(("consumed", 1))
    assert checkpoint.steps(live.directory) == [2, 3]
    assert (live.directory / "policy" / "config.json").is_file()


def test_times_and_the_previous_publish_are_in_the_metrics(live):
    first, second, third = live(3).metrics
    names = "loss wait_s prepare_s train_s publish_wait_s publish_s tflop_per_s peers"
    assert set(names.split()) <= first.keys()
    assert "checkpoint_s" in third and not {"checkpoint_s"} & {*first, *second}
    assert all(isinstance(value, float) for value in [*first.values(), *second.values()])


def test_replay_publishes_nothing_below_the_frontier_and_gives_the_same_weights(live):
    before = live(5)
    for newer in (4, 5):
        shutil.rmtree(checkpoint.folder(live.directory, newer))
    live_again = live(6, incarnation=1, frontier=5)
    replayed_steps = [("consumed", step) for step in (2, 3, 4)]
    published = [("publish", Version(1, 5)), ("consumed", 5), ("publish", Version(1, 6))]
    assert live_again.in_order == [("start", 2), *replayed_steps, *published]
    assert live_again.durables == [("durable", 4, 0), ("durable", 6, 0)]
    logged, replayed = before.metrics[2:5], live_again.metrics[:3]
    assert [m["loss"] for m in logged] == [m["loss"] for m in replayed]
    ours, theirs = live_again.weights[Version(1, 5)], before.weights[Version(0, 5)]
    assert equal(ours, theirs)


def test_a_restart_at_the_frontier_publishes_under_its_new_incarnation_at_once(live):
    live(2)
    assert live(2, incarnation=1, frontier=2).events == [("start", 2), ("publish", Version(1, 2))]


def test_the_next_batch_is_fetched_and_prepared_while_one_is_trained(live, monkeypatch):
    made_ready, prepare, step = [], Trainer.prepare, Trainer.step
    second_ready = threading.Event()

    def prepare_and_tell(trainer, batch):
        made_ready.append(batch.step)
        ready = prepare(trainer, batch)
        if batch.step == 1:
            second_ready.set()
        return ready

    def step_when_next_is_ready(trainer, batch, ready):
        assert batch.step or second_ready.wait(60)
        return step(trainer, batch, ready)

    monkeypatch.setattr(Trainer, "prepare", prepare_and_tell)
    monkeypatch.setattr(Trainer, "step", step_when_next_is_ready)
    live(2)
    assert made_ready == [0, 1]


def test_weights_are_sent_while_the_next_batch_is_trained(live, monkeypatch):
    trained, step, publish = threading.Event(), Trainer.step, Diary.publish

    def train_and_tell(trainer, batch, ready):
        metrics = step(trainer, batch, ready)
        trained.set()
        return metrics

    def publish_once_trained(diary, version, tensors, canary):
        assert trained.wait(60)
        return publish(diary, version, tensors, canary)

    monkeypatch.setattr(Trainer, "step", train_and_tell)
    monkeypatch.setattr(Diary, "publish", publish_once_trained)
    assert ("publish", Version(0, 2)) in live(2).events


class HeldSlice:
    """A time slice that notes whether the learner holds the accelerator."""

    is_shared, held = True, True

    def acquire(self, group=None):
        self.held = True
        return {}

    def release(self, trainer):
        self.held = False


def test_engines_that_share_the_accelerator_in_time_take_weights_before_the_next_batch_is_trained(
    policy_folder, one_rank, tmp_path, monkeypatch
):
    """A batch of groups that were left over is there at once, before engines can have loaded the last weights."""
    time_slice, publish, held = HeldSlice(), Diary.publish, []

    def publish_once_released(diary, version, tensors, canary):
        while time_slice.held and not held:
            time.sleep(0.01)
        time.sleep(0.2)
        held.append(time_slice.held)
        return publish(diary, version, tensors, canary)

    monkeypatch.setattr(Diary, "publish", publish_once_released)
    config = make_config(policy_folder, tmp_path / "run")
    diary = Diary(policy_folder, 3)
    loop.run(config, Trainer(config, torch.device("cpu")), diary, diary, time_slice)
    assert held == [False] * 4 and len(diary.metrics) == 3
    assert all("publish_s" in metrics for metrics in diary.metrics)


@pytest.fixture
def poison(monkeypatch):
    """Give the batches of these steps a loss that is not finite."""

    def these(*steps):
        fetch = Diary.fetch

        def fetch_poisoned(diary, step):
            batch = fetch(diary, step)
            return poisoned(batch) if batch and step in steps else batch

        monkeypatch.setattr(Diary, "fetch", fetch_poisoned)

    return these


def test_a_batch_without_finite_loss_is_stored_and_skipped_and_the_weights_published_again(live, poison):
    poison(2)
    diary = live(4)
    assert ("consumed", 2, "nonfinite") in diary.events
    versions = [event[1] for event in diary.events if event[0] == "publish"]
    assert versions == [Version(0, step) for step in range(5)]
    before, after = diary.weights[Version(0, 2)], diary.weights[Version(0, 3)]
    assert equal(before, after)
    kept = decode((live.directory.parent / "nonfinite" / "step_000002.msgpack").read_bytes())
    assert np.isnan(kept.groups[0][0].logprobs).all()


def test_too_many_nonfinite_batches_in_a_row_end_the_run(live, poison):
    poison(0, 2, 3, 4)
    with pytest.raises(loop.Diverged, match=r"3 batches .*step_000004\.msgpack.*learner\.lr"):
        live(9)


def test_a_batch_out_of_step_is_refused(live, monkeypatch):
    monkeypatch.setattr(Diary, "fetch", lambda self, step: TrainingBatch(step + 1, []))
    with pytest.raises(ValueError, match=r"batch 1 .*batch 0"):
        live(3)


@pytest.mark.full
def test_the_ranks_wait_for_a_slow_broker_and_a_slow_disk_longer_than_for_each_other(policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", checkpoint_every=2, collective_timeout_s=10)
    (result,) = run_ranks(2, [job(config, [], live={"last_step": 4}, late_s=11)], tmp_path / "ranks")
    assert [event for event in result["events"] if event[0] == "durable"] == [("durable", 2, 0), ("durable", 4, 2)]
    assert (config.exported_policy / "config.json").is_file()
