"""Every way of the weights from the learner to the workers, in a whole run: tokens are of the versions they name."""

import hashlib
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from april.config.stored import CHECKSUMS_FILE
from april.observe.report.run_folder import read_records
from april.util.objects import ObjectStore
from april.weights.folders import SnapshotFolders
from april.weights.snapshot import ReusedBuffers
from april.wire.message import Version
from april.wire.training import WeightFolder
from tests.support.journal_checks import versions_with_true_logprobs
from tests.support.run_processes import assert_closed, both_workers_are_there, steps_recorded, wait_until


def assert_tokens_are_of_their_versions(run_dir, policy_folder):
    models = {0: AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)}
    assert {0, 1, 2} <= versions_with_true_logprobs(run_dir, policy_folder, models)


@pytest.mark.full
def test_two_ranks_send_a_part_each_to_both_workers(start_run, run_dir, policy_folder, gate):
    job = start_run("--learner.ranks", "2", "--learner.lr", "1e-2", *gate.hold(0))
    wait_until(lambda: both_workers_are_there(job), job)
    gate.open()
    assert job.wait() == 0, job.output
    assert assert_closed(run_dir)["steps"] == 3
    logs = "".join(log.read_text() for log in run_dir.glob("logs/learner*.log"))
    assert "each of 2 ranks gathers and sends a part of the weights" in logs
    sent = [step["learner"]["publish_workers"] for step in read_records(run_dir / "metrics.jsonl")[1:]]
    assert sent == [2, 2]
    assert_tokens_are_of_their_versions(run_dir, policy_folder)


@pytest.mark.full
def test_workers_pull_snapshots_and_join_without_a_learner(start_run, run_dir, policy_folder, gate):
    """A killed worker comes back with weights while the learner is stopped, which is killed then: nobody sends any."""
    pull = [
        "--weights.transport", "pull", "--weights.delta", "auto", "--learner.ranks", "2", "--learner.lr", "1e-2",
        "--schedule.max_steps", "4",
    ]  # fmt: skip
    job = start_run(*pull, *gate.hold(2))
    wait_until(lambda: steps_recorded(run_dir) == 2, job)
    wait_until(lambda: all(proven(run_dir, index, "0.2") for index in (0, 1)), job)
    ranks = [pid for pid, _ in job.descendants("-u -m april.learner")]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    job.kill("--name worker-0")
    wait_until(lambda: (run_dir / "logs/worker-0.log").read_text().count("version 0.2 is proven") == 2, job)
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    gate.open()
    assert job.wait() == 0, job.output
    assert assert_closed(run_dir)["steps"] == 4
    assert_tokens_are_of_their_versions(run_dir, policy_folder)
    folders = SnapshotFolders(ObjectStore(str(run_dir / "weights")))
    newest = max((run_dir / "weights").iterdir())
    digest = hashlib.sha256((newest / CHECKSUMS_FILE).read_bytes()).hexdigest()
    last, read = WeightFolder(Version(int(newest.name.rpartition("-")[2]), 4), digest), None
    chain = folders.chain(last)
    for folder in (*chain, last):
        read = folders.read(folder, ReusedBuffers(), 60.0, read)
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints/policy", dtype=torch.float32).state_dict()
    assert chain and all(torch.equal(value, exported[name]) for name, value in read.tensors.items())


def proven(run_dir, index, version):
    """Whether the engine of a worker has been seen to hold a version."""
    return f"version {version} is proven" in (run_dir / f"logs/worker-{index}.log").read_text()
