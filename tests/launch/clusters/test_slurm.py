"""A real Slurm on hosts of its own: a learner over two nodes, a job that is queued again in the middle."""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest

from april.wire.security import keygen
from tests.support.hosts.hosts import hosts, name_of, slurm
from tests.support.run_processes import APRIL, assert_closed, steps_recorded, wait_until
from tests.support.step_gate import GATE

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
STEPS, HELD_AT = 60, 30
"""a checkpoint lies below, and behind the place where the job is queued again"""


@pytest.fixture
def cluster():
    """Its state has a short path: Slurm's sockets lie there, whose names have at most 108 bytes."""
    with TemporaryDirectory(prefix="slurm") as state, hosts(4, Path(state)) as made, slurm(made) as environment:

        def on_first(*command):
            told = subprocess.run(made.command(0, *command), env=environment, capture_output=True, text=True)
            assert told.returncode == 0, told.stdout + told.stderr
            return told.stdout

        yield on_first


def test_a_requeued_job_continues_with_a_learner_on_two_nodes_and_late_workers(
    cluster, config_file, run_dir, tmp_path, gate
):
    keygen.make_folder(tmp_path / "keys")
    held = gate.hold(HELD_AT)
    options = {
        "security.keys": tmp_path / "keys", "schedule.max_steps": STEPS, "worker.count": 1, "worker.device": "cpu",
        "learner.ranks": 2, "learner.device": "cpu", "learner.checkpoint_every": 25, "data.epochs": 1000,
        "launch.learner_nodes": 2, "launch.cores": 1, "launch.memory_gb": 2,
        "launch.environment": f"{{{GATE} = '{os.environ[GATE]}'}}",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    cluster(*APRIL, "launch", str(config_file), "--on", "slurm", *words, *held)
    main = orjson.loads((run_dir / "launch/submitted.json").read_bytes())["main"]

    def logs():
        """One of each job."""
        return list((run_dir / "launch").glob("*.log"))

    def said():
        return "".join(path.read_text() for path in run_dir.glob("l*/*.log"))

    try:
        wait_until(lambda: steps_recorded(run_dir) >= HELD_AT, timeout_s=600)
        cluster(*APRIL, "launch", "scale", str(run_dir), "workers=2")
        wait_until(lambda: len(logs()) >= 3)  # the run's job, and those of workers that have joined it
        cluster("scontrol", "requeue", main)
        wait_until(lambda: "PENDING" in cluster(*APRIL, "launch", "status", str(run_dir)))
        gate.open()
        cluster("scontrol", "update", f"JobId={main}", "StartTime=now")  # it would be held for two minutes
        wait_until(lambda: steps_recorded(run_dir) >= STEPS, timeout_s=600)
        wait_until(lambda: main not in cluster("squeue", "--noheader", "--format=%A"))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{said()}") from None
    summary = assert_closed(run_dir)
    assert summary["steps"] == STEPS and summary["state"] == "finished"
    assert summary["replays"]["different"] == 0 and summary["starts"]["broker"] == 2
    assert os.path.exists(run_dir / "checkpoints/policy")


def test_a_heterogeneous_job_signalled_in_time_requeues_both_components_and_continues(cluster, config_file, tmp_path):
    """Slurm's signal comes a minute before the job's time is over; here it comes sooner."""
    keygen.make_folder(tmp_path / "keys")
    run_dir = tmp_path / "runs" / "small"
    options = {
        "security.keys": tmp_path / "keys", "schedule.max_steps": 100_000, "data.epochs": 100_000, "worker.count": 1,
        "worker.device": "cpu", "learner.device": "cpu", "learner.ranks": 2, "launch.learner_nodes": 2,
        "launch.cores": 1, "launch.memory_gb": 2, "launch.time": "1:00:00", "launch.partition": "others",
        "launch.cpu_partition": "first",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    cluster(*APRIL, "launch", str(config_file), "--on", "slurm", *words)
    main = orjson.loads((run_dir / "launch/submitted.json").read_bytes())["main"]

    def components():
        """(id, state, nodes, time limit) of the run's first job."""
        told = cluster("squeue", "--noheader", "--jobs", main, "--format=%i %t %N %l")
        return [tuple(line.split()) for line in told.splitlines()]

    try:
        wait_until(lambda: steps_recorded(run_dir) >= 5, timeout_s=600)
        first, learner = components()
        assert (first[0], learner[0]) == (f"{main}+0", f"{main}+1") and first[3] == learner[3] == "1:00:00"
        assert first[2] == name_of(0) and name_of(0) not in learner[2]
        assert all(part in cluster(*APRIL, "launch", "status", str(run_dir)) for part in (first[0], learner[0]))
        assert "trained: reward" in cluster(*APRIL, "launch", "logs", str(run_dir), "broker")
        cluster("scancel", "--signal=USR1", "--batch", main)
        wait_until(lambda: [state for _, state, *_ in components()] == ["PD", "PD"], timeout_s=600)
        assert assert_closed(run_dir)["state"] == "stopped"
        before = steps_recorded(run_dir)
        cluster("scontrol", "update", f"JobId={main}", "StartTime=now")  # it would be held for two minutes
        wait_until(lambda: steps_recorded(run_dir) >= before + 5, timeout_s=600)
        cluster(*APRIL, "launch", "stop", str(run_dir))
        wait_until(lambda: not cluster("squeue", "--noheader"), timeout_s=600)
    except AssertionError as error:
        said = "".join(path.read_text() for path in run_dir.glob("l*/*.log"))
        raise AssertionError(f"{error}\n{said}") from None
    summary = assert_closed(run_dir)
    assert summary["state"] == "stopped" and summary["starts"]["broker"] == 2
    assert summary["replays"] == {"same": 0, "different": 0}, "it goes on from the checkpoint of the stop"
