"""`april run`: the processes of a run on one machine, started together, watched, and stopped together."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

from april import clock, wire
from april.client import BrokerConnection, BrokerUnreachable
from april.config import Config
from april.process import REFUSED, SUPERVISED
from april.security.keys import load_keys

POLL_MS = 200
STATUS_S = 0.5
START_S = 120.0
"""longest start of the broker: imports, dataset, replay of the journal"""
STOP_S = 600.0
"""longest wait for a run that was asked to stop, its last checkpoint included; then its processes are killed"""
CLOSE_S = 5.0
"""longest wait for workers and broker to leave in order after a failure"""
TAIL_LINES = 25
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class View(Protocol):
    """Where the run is shown."""

    def update(self, status: dict) -> None: ...

    def step(self, metrics: dict) -> None: ...

    def note(self, text: str) -> None: ...


class RunFailed(RuntimeError):
    """A part without which the run cannot go on has ended; the text holds its last lines."""


@dataclass
class Part:
    """One child process, in a process group of its own, with its output in a log file."""

    name: str
    command: list[str]
    log: Path
    threads: int
    restarts: int = 0
    process: subprocess.Popen | None = None

    def start(self) -> None:
        environment = os.environ | dict.fromkeys(THREAD_SETTINGS, str(self.threads)) | {SUPERVISED: str(os.getpid())}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self.process.poll() if self.process else None

    def kill(self) -> None:
        """End the whole process group."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"  {self.name} | {line}" for line in lines)


class Supervisor:
    """Runs one configuration to its end.

    status = Supervisor(config, view).run()      # "finished" or "stopped"; raises RunFailed
    """

    def __init__(self, config: Config, view: View):
        self.config = config
        self.view = view
        self.run_dir = config.run_dir
        self.logs = self.run_dir / "logs"
        self.workers: list[Part] = []
        self._started: list[Part] = []
        self.connection: BrokerConnection | None = None
        self.stop_by: float | None = None
        self._stop_signals = 0
        self._over = False
        self._metrics_read = 0
        self._next_status = 0.0

    def run(self) -> str:
        self.logs.mkdir(parents=True, exist_ok=True)
        config_path = self.run_dir / "config.toml"
        config_path.write_text(self.config.to_toml())
        (self.run_dir / "address").unlink(missing_ok=True)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.broker = self._part("broker", ["broker", str(config_path)])
            self._start(self.broker)
            address = self._wait_for_broker()
            if address is None:
                return "stopped"
            self.learner = self._learner_part(config_path, address)
            self.workers = [self._worker_part(index, config_path, address) for index in range(self.config.worker.count)]
            for part in (self.learner, *self.workers):
                self._start(part)
            return self._watch(address)
        finally:
            for part in reversed(self._started):
                part.kill()
            if self.connection:
                self.connection.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, part: Part) -> None:
        self._started.append(part)
        part.start()

    # --- parts ----------------------------------------------------------------------------------------------

    def _part(self, name: str, arguments: list[str], threads: int = 1) -> Part:
        command = [sys.executable, "-m", "april.cli", *arguments]
        return Part(name, command, self.logs / f"{name}.log", threads)

    def _worker_part(self, index: int, config_path: Path, address: str) -> Part:
        name = f"worker-{index}"
        arguments = ["worker", str(config_path), "--connect", address, "--name", name]
        return self._part(name, arguments, self.config.worker.threads)

    def _learner_part(self, config_path: Path, address: str) -> Part:
        ranks = str(self.config.learner.ranks)
        torchrun = [sys.executable, "-m", "april.learner.launch", "--standalone", "--nproc-per-node", ranks]
        command = [*torchrun, "-m", "april.learner", str(config_path), "--connect", address]
        return Part("learner", command, self.logs / "learner.log", self.config.learner.threads)

    def _wait_for_broker(self) -> str | None:
        """The broker's address; None if the user stops the run before there is one."""
        address_file = self.run_dir / "address"
        deadline = clock.now() + START_S
        while not address_file.exists():
            if self.broker.status is not None:
                raise RunFailed(f"the broker ended at its start:\n{self.broker.last_lines()}")
            if clock.now() > deadline:
                raise RunFailed(f"the broker did not start within {START_S:g} s:\n{self.broker.last_lines()}")
            if self._stop_signals:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.broker.process.wait(timeout=0.05)
        return address_file.read_text()

    def _connect(self, address: str) -> None:
        keys = load_keys(self.config.security.keys, "monitor")
        self.connection = BrokerConnection(address, "monitor", "april run", uuid.uuid4().hex, keys)
        self.connection.hello(leases=[])

    # --- watching -------------------------------------------------------------------------------------------

    def _watch(self, address: str) -> str:
        try:
            self._connect(address)
        except BrokerUnreachable as error:
            raise RunFailed(f"{error}\n{self.broker.last_lines()}") from None
        while True:
            self._show()
            if self.broker.status is not None:
                return self._broker_ended()
            if self.learner.status not in (None, 0):
                self._fail(self.learner)
            if self._stop_signals and self.stop_by is None:
                self._ask_to_stop()
            if not self._over and self.stop_by is None:
                self._restart_workers()
            if self.stop_by is not None and clock.now() > self.stop_by:
                raise RunFailed(f"the run did not stop within {STOP_S:g} s and was killed")

    def _restart_workers(self) -> None:
        for worker in self.workers:
            if worker.status in (None, 0):
                continue
            if worker.status == REFUSED or worker.restarts >= self.config.worker.max_restarts:
                self._fail(worker)
            worker.restarts += 1
            limit = self.config.worker.max_restarts
            self.view.note(f"{worker.name} ended with status {worker.status}; restart {worker.restarts} of {limit}")
            worker.start()

    def _fail(self, part: Part) -> None:
        """Let workers hand in what they have and the broker close the books, then give up."""
        failure = f"{part.name} ended with status {part.status}; its last lines:\n{part.last_lines()}"
        self._stop_run(f"{part.name} ended with status {part.status}", "failed")
        deadline = clock.now() + CLOSE_S
        while clock.now() < deadline and self.broker.status is None:
            self._poll_status()
        raise RunFailed(failure)

    def _broker_ended(self) -> str:
        if self.broker.status != 0:
            status, lines = self.broker.status, self.broker.last_lines()
            raise RunFailed(f"the broker ended with status {status}; its last lines:\n{lines}")
        deadline = clock.now() + CLOSE_S
        for part in (self.learner, *self.workers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.process.wait(timeout=max(0.1, deadline - clock.now()))
        self._show_new_steps()
        if self._stop_signals:
            return "stopped"
        if self.learner.status != 0:
            raise RunFailed(f"learner ended with status {self.learner.status}:\n{self.learner.last_lines()}")
        return "finished"

    def _on_signal(self, number: int, frame) -> None:
        self._stop_signals += 1
        if self._stop_signals > 2:
            raise RunFailed("stopped at once, at the third signal")

    def _ask_to_stop(self) -> None:
        self.view.note("stopping: what is acknowledged is kept, the learner writes a checkpoint; Ctrl-C twice: at once")
        self.stop_by = clock.now() + STOP_S
        self._stop_run("stopped by the user", "stopped")

    def _stop_run(self, reason: str, state: str) -> None:
        """Tell the broker; a broker that does not answer is seen, or killed, by whoever calls."""
        for _ in range(2):
            try:
                self.connection.request(wire.StopRun(reason, state), 5.0)
                return
            except BrokerUnreachable:
                with contextlib.suppress(BrokerUnreachable):
                    self.connection.hello([], timeout_s=5.0)

    # --- showing --------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self._show_new_steps()
        self._poll_status()

    def _poll_status(self) -> None:
        if clock.now() >= self._next_status:
            self._next_status = clock.now() + STATUS_S
            self.connection.send(wire.StatusRequest())
        for received in self.connection.receive(POLL_MS):
            if self.connection.is_disowned(received):
                return self._say_hello_again()
            if isinstance(received.message, wire.Status):
                status = orjson.loads(received.arrays[0].tobytes())
                self._over = status["phase"] == "finished"
                self.view.update(status)

    def _say_hello_again(self) -> None:
        """After a pause, say of this process's terminal, the broker has ended the session."""
        with contextlib.suppress(BrokerUnreachable):
            self.connection.hello([])

    def _show_new_steps(self) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        if not metrics.exists():
            return
        with metrics.open("rb") as file:
            file.seek(self._metrics_read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._metrics_read += len(line)
                self.view.step(orjson.loads(line))
