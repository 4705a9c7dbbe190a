"""The learner's life against a source and a publisher in memory: order of reports, replay, restart, the end."""

import shutil

import pytest
import torch
from learner_setup import Diary, job, make_config, run_ranks

from april.learner import checkpoint, loop
from april.learner.batch import Batch
from april.learner.trainer import Trainer
from april.version import Version


@pytest.fixture
def live(one_rank, policy_folder, tmp_path):
    """Run a learner's life in the same run folder, up to `last_step`; its diary."""

    def run(last_step, **answers):
        config = make_config(policy_folder, tmp_path / "run", checkpoint_every=2, keep_checkpoints=9)
        diary = Diary(policy_folder, last_step, **answers)
        loop.run(config, Trainer(config, torch.device("cpu")), diary, diary)
        return diary

    run.directory = tmp_path / "run" / "checkpoints"
    return run


def test_a_fresh_run_publishes_at_once_then_reports_each_batch_before_its_weights(live):
    assert live(3).events == [
        ("start", 0),
        ("publish", Version(0, 0)),
        ("consumed", 0),
        ("publish", Version(0, 1)),
        ("consumed", 1),
        ("durable", 2, 0),
        ("publish", Version(0, 2)),
        ("consumed", 2),
        ("publish", Version(0, 3)),
        ("durable", 3, 0),
    ]
    assert checkpoint.steps(live.directory) == [2, 3]
    assert (live.directory / "policy" / "config.json").is_file()


def test_times_and_the_previous_publish_are_in_the_metrics(live):
    first, second, _ = live(3).metrics
    assert {"loss", "wait_s", "train_s", "publish_s", "peers"} <= first.keys()
    assert "checkpoint_s" in second and "checkpoint_s" not in first
    assert all(isinstance(value, float) for value in [*first.values(), *second.values()])


def test_replay_publishes_nothing_below_the_frontier_and_gives_the_same_weights(live):
    before = live(5)
    for newer in (4, 5):
        shutil.rmtree(checkpoint.folder(live.directory, newer))
    live_again = live(6, branch=1, frontier=5)
    assert live_again.events == [
        ("start", 2),
        ("consumed", 2),
        ("consumed", 3),
        ("durable", 4, 0),
        ("consumed", 4),
        ("publish", Version(1, 5)),
        ("consumed", 5),
        ("durable", 6, 0),
        ("publish", Version(1, 6)),
    ]
    logged, replayed = before.metrics[2:5], live_again.metrics[:3]
    assert [m["loss"] for m in logged] == [m["loss"] for m in replayed]
    ours, theirs = live_again.weights[Version(1, 5)], before.weights[Version(0, 5)]
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_restart_at_the_frontier_publishes_under_its_new_branch_at_once(live):
    live(2)
    assert live(2, branch=1, frontier=2).events == [("start", 2), ("publish", Version(1, 2))]


def test_a_batch_out_of_step_is_refused(live, monkeypatch):
    monkeypatch.setattr(Diary, "fetch", lambda self, step: Batch(step + 1, []))
    with pytest.raises(ValueError, match="batch 1 arrived where batch 0 was due"):
        live(3)


def test_two_ranks_live_through_a_run_and_a_replay(policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", checkpoint_every=2, keep_checkpoints=9)
    (first,) = run_ranks(2, [job(config, [], live={"last_step": 3})], tmp_path / "first")
    shutil.rmtree(config.run_dir / "checkpoints" / "step_000003")
    (again,) = run_ranks(2, [job(config, [], live={"last_step": 3, "branch": 1, "frontier": 3})], tmp_path / "again")
    assert again["events"] == [("start", 2), ("consumed", 2), ("publish", (1, 3)), ("durable", 3, 0)]
    assert again["losses"] == first["losses"][2:]
    assert all(torch.equal(value, again["weights"][name]) for name, value in first["weights"].items())
