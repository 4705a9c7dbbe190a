"""A real Ray on hosts of its own: a run as a job, with an actor and then a whole machine killed in the middle."""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from april.wire.security import keygen
from tests.support.hosts.hosts import Hosts, end, hosts, run
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
BIN = Path(__file__).parents[3] / ".venv-ray/bin"
RAY, APRIL = str(BIN / "ray"), [str(BIN / "python"), "-m", "april.cli"]
PORT, STORE_BYTES, CORES = 6380, 80_000_000, 4
PATIENCE_S = 300.0


class Machines:
    """Each with a raylet; the first is the head.

    environment: by which Ray's commands find them
    """

    def __init__(self, made: Hosts, stack: ExitStack):
        self.made, self.stack = made, stack
        self.starts = 0
        self.environment = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
            "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265",
            "RAY_ADDRESS": f"{made.address(0)}:{PORT}",
            "RAY_worker_niceness": "0",  # 15 by default: beside other tests its actors would hardly get a core
            "OMP_NUM_THREADS": "1",
        }

    def start(self, index: int) -> None:
        made, log = self.made, self.made.state / f"ray-{index}-{self.starts}.log"
        self.starts += 1
        here = [f"--node-ip-address={made.address(index)}", f"--num-cpus={CORES}", "--block"]
        head = ["--head", f"--port={PORT}", f"--temp-dir={made.state}/ray", f"--object-store-memory={STORE_BYTES}"]
        joins = [f"--address={made.address(0)}:{PORT}", f"--object-store-memory={STORE_BYTES}"]
        with log.open("wb") as output:
            node = subprocess.Popen(
                made.command(index, RAY, "start", *here, *(joins if index else head)),
                stdout=output, stderr=output, env=self.environment, start_new_session=True,
            )  # fmt: skip
        self.stack.callback(end, node)
        wait_until(lambda: log.read_text().count("Ray runtime started"), timeout_s=PATIENCE_S)

    def kill(self, index: int) -> None:
        """Stop the node with all its processes."""
        for process in run("ip", "netns", "pids", self.made.names[index]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def ask(self, *command: str) -> str:
        """Output of a command on the first node, which must succeed."""
        told = subprocess.run(self.made.command(0, *command), env=self.environment, capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout


@pytest.fixture
def machines():
    with TemporaryDirectory(prefix="ray") as state, hosts(2, Path(state)) as made, ExitStack() as stack:
        started = Machines(made, stack)
        for index in range(2):
            started.start(index)
        yield started


def test_a_ray_job_trains_on_two_machines_and_survives_a_killed_actor_and_a_lost_machine(
    machines, config_file, tmp_path
):
    cluster = machines.ask
    keygen.make_folder(tmp_path / "keys")
    run_dir = tmp_path / "runs" / "small"
    options = {
        "security.keys": tmp_path / "keys", "schedule.max_steps": 100_000, "data.epochs": 1000, "worker.count": 1,
        "worker.device": "cpu", "learner.ranks": 2, "learner.device": "cpu", "launch.learner_nodes": 2,
        "launch.cores": 1, "launch.memory_gb": 1, "learner.collective_timeout_s": 15,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    cluster(*APRIL, "launch", str(config_file), "--on", "ray", *words)

    def status():
        return cluster(*APRIL, "launch", "status", str(run_dir))

    def place(part):
        return next(line for line in status().splitlines() if line.startswith(f"{part} "))

    def running(part, before=""):
        """Where it is, once it runs, and not where it was."""
        seen = []
        wait_until(
            lambda: seen.append(place(part)) or ("process" in seen[-1] and seen[-1] != before), timeout_s=PATIENCE_S
        )
        return seen[-1]

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
    before = running("worker-0")
    os.kill(int(before.split()[-1]), signal.SIGKILL)
    running("worker-0", before)
    wait_until(lambda: '"worker-1"' in (run_dir / "metrics.jsonl").read_text(), timeout_s=PATIENCE_S)
    train_on(3)
    before = running("learner-1")
    machines.kill(1)
    machines.start(1)
    running("learner-1", before)
    train_on(3)
    assert "worker-0" in cluster(*APRIL, "launch", "logs", str(run_dir), "worker-0")
    cluster(*APRIL, "launch", "stop", str(run_dir))
    wait_until(lambda: " succeeded" in status(), timeout_s=PATIENCE_S)
    assert assert_closed(run_dir)["state"] == "stopped"
