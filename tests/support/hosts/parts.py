"""The parts of a run, each started by `april part` on a host of its own."""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

from april.observe.report.run_folder import read_records
from tests.support.hosts.hosts import Hosts, end
from tests.support.run_processes import APRIL, PATIENCE_S

BROKER_PORT = 5555
ROOT = Path(__file__).parents[3]


class Parts:
    """The parts of one run on several hosts. `processes`: each part's process by name, ended ones included.

    with parts(hosts, config_file, run_dir, {"security.keys": keys}) as run:
        run.broker(0)
        run.learner([1, 2])
        run.join("worker", 3)
    """

    def __init__(self, made: Hosts, config_file: Path, run_dir: Path, options: Mapping[str, object]):
        self.made, self.config_file, self.run_dir = made, config_file, run_dir
        self.options = [f"--{key}={value}" for key, value in options.items()]
        self.logs = made.state / f"logs-{run_dir.name}"
        self.logs.mkdir()
        self.processes: dict[str, subprocess.Popen] = {}
        self.address = ""

    def broker(self, host: int) -> None:
        self.address = f"tcp://{self.made.address(host)}:{BROKER_PORT}"
        self._start("broker", host, "broker", f"--broker.bind={self.address}")

    def learner(self, hosts: list[int]) -> None:
        """Start the learner over these hosts; its ranks are spread evenly."""
        for node in range(len(hosts)):
            self.learner_node(node, hosts)

    def learner_node(self, node: int, hosts: list[int]) -> None:
        across = [f"--nodes={len(hosts)}", f"--node={node}"]
        self._start(f"learner-{node}", hosts[node], "learner", *self._joining, *across)

    def join(self, role: str, host: int) -> None:
        self._start(role, host, role, *self._joining)

    @property
    def _joining(self) -> list[str]:
        return ["--connect", self.address]

    def _start(self, name: str, host: int, role: str, *words: str) -> None:
        command = self.made.command(host, *APRIL, "part", role, str(self.config_file), *self.options, *words)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every part has ended with status 0."""
        deadline = time.monotonic() + timeout_s
        for name, process in self.processes.items():
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} still runs\n{self.said()}") from None
            assert status == 0, f"{name} ended with status {status}\n{self.said()}"

    def steps(self) -> list[dict]:
        """Records of the trained steps in metrics.jsonl so far, without the lines of evaluations."""
        return read_records(self.run_dir / "metrics.jsonl")

    def said(self) -> str:
        return "\n".join(f"==> {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.logs.glob("*.log")))


@contextmanager
def parts(made: Hosts, config_file: Path, run_dir: Path, options: Mapping[str, object]):
    run = Parts(made, config_file, run_dir, options)
    try:
        yield run
    finally:
        for process in run.processes.values():
            end(process)
