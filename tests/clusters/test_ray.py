"""A real Ray on hosts of its own: a run as a job, with an actor killed in the middle."""

import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from april.security import keygen
from tests.clusters.hosts import end, hosts
from tests.run.processes import APRIL, assert_closed, steps_recorded, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
RAY = str(Path(APRIL[0]).with_name("ray"))
PORT, STORE_BYTES, CORES = 6380, 80_000_000, 4
PATIENCE_S = 300.0


@contextmanager
def ray_on(made):
    """The environment by which Ray's commands find a cluster of all hosts."""
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265",
        "RAY_ADDRESS": f"{made.address(0)}:{PORT}",
        "RAY_worker_niceness": "0",  # 15 by default: beside other tests its actors would hardly get a core
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        for index in range(len(made.names)):
            here = [f"--node-ip-address={made.address(index)}", f"--num-cpus={CORES}", "--block"]
            head = ["--head", f"--port={PORT}", f"--temp-dir={made.state}/ray", f"--object-store-memory={STORE_BYTES}"]
            joins = [f"--address={made.address(0)}:{PORT}", f"--object-store-memory={STORE_BYTES}"]
            with (made.state / f"ray-{index}.log").open("wb") as log:
                node = subprocess.Popen(
                    made.command(index, RAY, "start", *here, *(joins if index else head)),
                    stdout=log, stderr=log, env=environment, start_new_session=True,
                )  # fmt: skip
            stack.callback(end, node)
            wait_until(lambda: (made.state / f"ray-{index}.log").read_text().count("Ray runtime started"))  # noqa: B023
        yield environment


@pytest.fixture
def cluster():
    """ask(*command) -> what it says on the first of two hosts"""
    with TemporaryDirectory(prefix="ray") as state, hosts(2, Path(state)) as made, ray_on(made) as environment:

        def ask(*command):
            told = subprocess.run(made.command(0, *command), env=environment, capture_output=True, text=True)
            assert told.returncode == 0, told.stdout + told.stderr
            return told.stdout

        yield ask


def test_a_ray_job_trains_with_its_learner_on_two_hosts_and_a_killed_actor_comes_again(cluster, config_file, tmp_path):
    keygen.make_folder(tmp_path / "keys")
    run_dir = tmp_path / "runs" / "small"
    options = {
        "security.keys": tmp_path / "keys", "schedule.max_steps": 100_000, "data.epochs": 1000, "worker.count": 1,
        "worker.device": "cpu", "learner.ranks": 2, "learner.device": "cpu", "launch.learner_nodes": 2,
        "launch.cores": 1, "launch.memory_gb": 1,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    cluster(*APRIL, "launch", str(config_file), "--on", "ray", *words)

    def status():
        return cluster(*APRIL, "launch", "status", str(run_dir))

    def place(part):
        return next(line for line in status().splitlines() if line.startswith(f"{part} "))

    def train_on(steps):
        reached = steps_recorded(run_dir) + steps
        try:
            wait_until(lambda: steps_recorded(run_dir) >= reached, timeout_s=PATIENCE_S)
        except AssertionError as error:
            logs = "\n".join(f"==> {log}\n{log.read_text()[-2000:]}" for log in (run_dir / "logs").glob("*.log"))
            raise AssertionError(f"{error}\n{status()}\n{logs}") from None

    train_on(3)
    cluster(*APRIL, "launch", "scale", str(run_dir), "workers=2")
    wait_until(lambda: "worker-1     10" in status())
    wait_until(lambda: "process" in place("worker-0"))
    before = place("worker-0")
    os.kill(int(before.split()[-1]), signal.SIGKILL)
    wait_until(lambda: "process" in (now := place("worker-0")) and now != before)
    wait_until(lambda: '"worker-1"' in (run_dir / "metrics.jsonl").read_text(), timeout_s=PATIENCE_S)
    train_on(3)
    assert "worker-0" in cluster(*APRIL, "launch", "logs", str(run_dir), "worker-0")
    cluster(*APRIL, "launch", "stop", str(run_dir))
    wait_until(lambda: " succeeded" in status(), timeout_s=PATIENCE_S)
    assert assert_closed(run_dir)["state"] == "stopped"
