"""`april run`: starts, supervises and stops the processes of a run on one machine."""

import contextlib
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import orjson

from april import wire
from april.broker.telemetry.evaluation import describe_evaluation
from april.broker.telemetry.metrics_file import parse_line
from april.broker.telemetry.recorder import read_summary
from april.config import AgentSection, BrokerSection, Config, ScorerSection, WorkerSection
from april.config.stored import is_step
from april.launch import TARGETS
from april.launch.devices import environment_of
from april.launch.start_up import StartUp
from april.launch.target import Program, Target
from april.util import clock
from april.util.files import replace_file
from april.util.lifetime import (
    REFUSED,
    RUN_FAILED,
    STEADY_S,
    STEPPED_ASIDE,
    SUPERVISED,
    leave_terminal,
    restart_delay_s,
    stop_signals,
    was_interrupted,
)
from april.util.logs import last_error
from april.util.registry import python_command
from april.util.text import counted
from april.util.versions import RUN_FOLDER
from april.wire.limits import clip
from april.wire.security.keygen import make_folder_once
from april.wire.security.keys import load_keys
from april.wire.sockets.base import ADDRESS_FILE, remove_socket_folder
from april.wire.sockets.broker import BrokerConnection, BrokerUnreachable

POLL_MS = 200
STATUS_S = 0.5
STALE_STATUS_S = 5.0
"""Age at which the broker's last status is stale: a broker that did not answer may not have heard the other parts."""
HELLO_S = 2.0
"""Longest wait for a broker's welcome before the processes are checked again."""
STOP_S = 600.0
"""Longest wait for a run that was asked to stop, beyond learner.load_s; includes its last checkpoint."""
KILL_S = 30.0
"""Longest wait for a killed process; one stuck in a driver or a dead file system is left behind."""
ASK_AGAIN_S = 5.0
"""Interval between stop requests, since a broker that is being restarted misses them."""
CLOSE_S = 5.0
"""Longest wait for workers and broker to end by themselves after a failure."""
LEARNER_CLOSE_S = 60.0
"""Longest wait for the learner to end after the run is over and the policy written."""
FATAL_STATUSES = {REFUSED: "refuses to work", RUN_FAILED: "says that the run has failed"}
"""Exit statuses with which the run fails -> meaning; REFUSED only at a part's first start, or once it was heard."""
TAIL_LINES = 25
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class View(Protocol):
    """Displays the progress of a run."""

    def update(self, status: dict) -> None: ...

    def step(self, metrics: dict) -> None: ...

    def note(self, text: str) -> None: ...


class RunFailed(RuntimeError):
    """Raised when a part that the run needs has ended for good; the text has the last lines of its log."""


@dataclass
class Part:
    """A process of the run, with its restarts, its liveness and its log file."""

    target: Target
    name: str
    command: list[str]
    log: Path
    threads: int
    max_restarts: int
    hung_s: float
    """Longest silence before the part is killed (seconds)."""
    load_s: float
    """Time limit (s) from a start of the part to its first message to the broker; then the part is killed."""
    devices: Sequence[str] = ()
    """Accelerators visible to the part; empty: those of this process."""
    program: Program | None = None
    log_offset: int = 0
    """Bytes in the log file that an earlier start of the run has written."""
    start_offset: int = 0
    """Bytes in the log file that earlier processes of the part have written."""
    told_cause: str = ""
    restarts: int = 0
    """Restarts since the part last had a share in a new step, or was at work for STEADY_S seconds."""
    started_at: float = 0.0
    heard_at: float = 0.0
    """Time at which the part was last known to be alive (seconds)."""
    at_work_since: float | None = None
    """Time at which the part was first seen working since its start (seconds)."""
    was_heard: bool = False
    """Whether the broker has heard from the part since the part's start."""
    had_predecessor: bool = False
    """Whether an earlier process of this part ran, which the broker's status may still refer to."""
    restart_at: float | None = None
    """Time of the part's next start while it waits for a restart (seconds)."""

    def start(self) -> None:
        self.started_at = self.heard_at = clock.now()
        self.was_heard, self.at_work_since, self.restart_at = False, None, None
        self.had_predecessor = self.program is not None
        self.start_offset = self.log.stat().st_size if self.log.exists() else 0
        self.log_offset = self.log_offset if self.program else self.start_offset
        own = dict.fromkeys(THREAD_SETTINGS, str(self.threads)) | {SUPERVISED: str(os.getpid())}
        self.program = self.target.start(self.name, self.command, own | environment_of(self.devices), self.log)

    def note_heard(self, at: float) -> None:
        """Note that the part was alive at time `at`; right after a restart `at` may still refer to the previous
        process."""
        self.heard_at = max(self.heard_at, at)
        self.was_heard = self.was_heard or at - self.started_at > (STALE_STATUS_S if self.had_predecessor else 0.0)

    @property
    def longest_silence_s(self) -> float:
        return self.hung_s if self.was_heard else self.load_s

    @property
    def status(self) -> int | None:
        """Exit status of the part's process; None while it runs."""
        return self.program.status() if self.program else None

    def wait(self, timeout_s: float) -> None:
        """Wait until the part's process has ended, at most `timeout_s`."""
        if self.program:
            self.program.wait(timeout_s)

    def kill(self) -> None:
        """Kill the part's process and its child processes."""
        if self.program:
            self.program.kill()
            self.wait(KILL_S)

    def note_work(self, now: float) -> None:
        """Note that the part is at work; after `STEADY_S` seconds of work, its count of restarts is reset."""
        self.at_work_since = now if self.at_work_since is None else self.at_work_since
        if now - self.at_work_since >= STEADY_S:
            self.restarts = 0

    def take_cause(self) -> str:
        """A colon and the error in the log that ended the part's process; empty if the last call returned the same."""
        told, self.told_cause = self.told_cause, ""
        if (self.status or 0) > 0:  # not by a signal
            self.told_cause = clip(last_error(self._logged(self.start_offset)))
        return f": {self.told_cause}" if self.told_cause not in ("", told) else ""

    def last_lines(self) -> str:
        return "\n".join(f"  {self.name} | {line}" for line in self._logged(self.log_offset).splitlines()[-TAIL_LINES:])

    def _logged(self, offset: int) -> str:
        return self.log.read_bytes()[offset:].decode(errors="replace") if self.log.exists() else ""


class Supervisor:
    """Runs one configuration to its end.

    status = Supervisor(config, view, devices_by_part).run()      # "finished" or "stopped"; raises RunFailed
    """

    def __init__(
        self,
        config: Config,
        view: View,
        devices_by_part: Mapping[str, Sequence[str]] | None = None,
        has_learner: bool = True,
    ):
        """`devices_by_part`: accelerators by part name, for parts that get their own; `has_learner`: whether the run
        starts its learner, False with an external trainer."""
        self.config = config
        self.has_learner = has_learner
        self.learner: Part | None = None
        self.view = view
        self.devices_by_part = devices_by_part or {}
        self.target: Target = TARGETS.find(config.run.target)()
        self.run_dir = config.run_dir
        self.logs = self.run_dir / "logs"
        self.workers: list[Part] = []
        """Workers, scorers and agents processes."""
        self._started: list[Part] = []
        self.connection: BrokerConnection | None = None
        self._address = ""
        """The broker's address; "" until it listens."""
        self.stop_by: float | None = None
        self._stop_s = config.learner.load_s + STOP_S
        self._next_stop_request_s = 0.0
        self._stop_signals = 0
        self._is_finished = False
        self._read_only = ""
        self._metrics_read = 0
        self._next_status = self._last_status_s = 0.0
        """Times (seconds) of the next request to the broker for its status, and of the last status received."""
        self._highest_step = 0
        self._evaluations = len(read_summary(self.run_dir / "summary.json").get("evaluation") or [])
        """Number of evaluations that `_note_evaluations` has noted, in this start of the run or earlier ones."""
        self.start_up = StartUp(lambda text: view.note(text))

    def run(self) -> str:
        self.logs.mkdir(parents=True, exist_ok=True)
        if self.config.made_keys:
            make_folder_once(self.config.made_keys)
        config_path = self.run_dir / "config.toml"
        RUN_FOLDER.claim(self.run_dir, new=not config_path.exists())
        replace_file(config_path, self.config.to_toml().encode())
        (self.run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        previous = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            self._stop_signals += was_interrupted()
            self.broker = self._part("broker", ["broker", str(config_path)], self.config.broker)
            self._start(self.broker)
            broker = str(self.run_dir)
            if self.has_learner:
                self.learner = self._learner_part(config_path, broker)
            self.workers = [self._worker_part(index, config_path, broker) for index in range(self.config.worker.count)]
            for role, count in (("scorer", self.config.scorers), ("agents", self.config.agents)):
                self.workers += [self._holder_part(role, index, config_path, broker) for index in range(count)]
            for part in self._all_but_broker:
                self._start(part)
            self.start_up.parts_started([part.name for part in self._started], self.logs)
            address = self._wait_for_broker()
            if address is None:
                return "stopped"
            self._address = address
            self.start_up.note_once(f"the broker listens at {address}")
            self.connection = self._connection(address)
            return self._watch()
        finally:
            for part in reversed(self._started):
                part.kill()
            remove_socket_folder(self._address)
            if self.connection:
                self.connection.close(linger_ms=0)  # the broker has ended
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def _all_but_broker(self) -> list[Part]:
        """All parts except the broker."""
        return [part for part in (self.learner, *self.workers) if part]

    def _start(self, part: Part) -> None:
        self._started.append(part)
        part.start()

    # --- parts ----------------------------------------------------------------------------------------------

    def _part(
        self,
        name: str,
        arguments: list[str],
        limits: BrokerSection | WorkerSection | ScorerSection | AgentSection,
        threads: int = 1,
    ) -> Part:
        command = python_command("-m", "april.cli", *arguments)
        log, own = self.logs / f"{name}.log", self.devices_by_part.get(name, ())
        return Part(self.target, name, command, log, threads, limits.max_restarts, limits.hung_s, limits.hung_s, own)

    def _worker_part(self, index: int, config_path: Path, address: str) -> Part:
        name = f"worker-{index}"
        arguments = ["worker", str(config_path), "--connect", address, "--name", name]
        return self._part(name, arguments, self.config.worker, self.config.worker.threads)

    def _holder_part(self, role: str, index: int, config_path: Path, address: str) -> Part:
        """The `Part` ROLE-INDEX, a scorer or agents process. `role`: "scorer" or "agents"; `address`: the broker's."""
        name, limits = f"{role}-{index}", self.config.scorer if role == "scorer" else self.config.agent
        return self._part(name, [role, str(config_path), "--connect", address, "--name", name], limits)

    def _learner_part(self, config_path: Path, address: str) -> Part:
        section = self.config.learner
        launch = ["-m", "april.learner.launch", "--nproc-per-node", str(section.ranks)]
        command = python_command(*launch, "-m", "april.learner", str(config_path), "--connect", address)
        log, devices = self.logs / "learner.log", self.devices_by_part.get("learner", ())
        return Part(
            self.target, "learner", command, log, section.threads, section.max_restarts, section.hung_s, section.load_s,
            devices,
        )  # fmt: skip

    def _wait_for_broker(self) -> str | None:
        """Wait for the broker's address; returns None if the user stops the run before. Raises RunFailed."""
        address_file = self.run_dir / ADDRESS_FILE
        deadline = clock.now() + (longest_s := self.config.broker.hung_s)
        while not address_file.exists():
            if self.broker.status is not None:
                raise RunFailed(f"the broker ended at its start:\n{self.broker.last_lines()}")
            if clock.now() > deadline:
                late = f"the broker did not start within 'broker.hung_s' = {longest_s:g} s"
                raise RunFailed(f"{late}; raise it if the dataset takes longer to read:\n{self.broker.last_lines()}")
            if self._stop_signals:
                return None
            self.broker.wait(0.05)
        return address_file.read_text()

    def _connection(self, address: str) -> BrokerConnection:
        keys = load_keys(self.config.keys, "monitor")
        return BrokerConnection(address, "monitor", "april run", uuid.uuid4().hex, self.config.broker.patience_s, keys)

    # --- watching -------------------------------------------------------------------------------------------

    def _watch(self) -> str:
        while True:
            self._show_new_steps()
            self._poll_status()
            if self.broker.status == 0:
                return self._broker_ended()
            if self._stop_signals and not self._is_finished and clock.now() >= self._next_stop_request_s:
                self._ask_to_stop()
            ending = self._is_finished or self.stop_by is not None
            for part in (self.broker, *self._all_but_broker):
                if not (ending and part in self.workers):
                    self._restart_if_needed(part)
            if self.stop_by is not None and clock.now() > self.stop_by:
                raise RunFailed(f"the run did not stop within {self._stop_s:g} s and was killed")

    def _restart_if_needed(self, part: Part) -> None:
        """Restart a dead or hung part. Raises RunFailed after too many restarts without a new step, or a fatal exit
        status."""
        if part.restart_at is not None:
            if clock.now() >= part.restart_at:
                part.start()
                if part is self.broker:
                    self._reset_silence()
            return
        known_until = clock.now() if part is self.broker else self._last_status_s
        if part.status is None and known_until - part.heard_at > part.longest_silence_s:
            self.view.note(f"{part.name} has not been heard of for {part.longest_silence_s:g} s and is killed")
            part.kill()
        if part.status in (None, 0):
            return
        ended = f"{part.name} ended with status {part.status}"
        if part.status == RUN_FAILED or (part.status == REFUSED and (part.was_heard or not part.had_predecessor)):
            self._fail(part, f"{ended}: it {FATAL_STATUSES[part.status]}")
        if part.status == STEPPED_ASIDE:
            part.restart_at = clock.now()
            return self.view.note(f"{part.name} was told to leave; it is started again, and goes on")
        if part.restarts >= part.max_restarts and not self._read_only:
            self._fail(part, f"{ended}, {counted(part.restarts, 'restart')} did not help" if part.restarts else ended)
        cause = part.take_cause()
        part.kill()
        part.restarts += 1
        wait_s = restart_delay_s(part.restarts, part.max_restarts)
        part.restart_at = clock.now() + wait_s
        when = f" in {wait_s:.0f} s" if wait_s else ""
        self.view.note(f"{ended}{cause}; restart {part.restarts} of {part.max_restarts}{when}")

    def _reset_silence(self) -> None:
        """Restart every part's silence timer, because a broker that was away, or cannot write, accepts no peers."""
        for part in self._started:
            part.heard_at = clock.now()

    def _fail(self, part: Part, reason: str) -> NoReturn:
        """Stop the run in order (workers return samples, the learner writes a checkpoint, the broker ends), then raise
        RunFailed."""
        self.view.note(f"{reason}; the run is ended")
        if part is not self.broker:
            self._stop_run(reason, "failed")
            deadline = clock.now() + (CLOSE_S if part is self.learner else self._stop_s)
            while clock.now() < deadline and self.broker.status is None:
                if self.learner and self.learner.status is not None:
                    deadline = min(deadline, clock.now() + CLOSE_S)
                self._poll_status()
        raise RunFailed(f"{reason}; its last lines:\n{part.last_lines()}")

    def _broker_ended(self) -> str:
        if self.learner:
            self.learner.wait(LEARNER_CLOSE_S)
        deadline = clock.now() + CLOSE_S
        for part in self.workers:
            part.wait(max(0.1, deadline - clock.now()))
            if part.status and part.restart_at is None:  # one that waits for its restart was noted
                self.view.note(f"{part.name} ended with status {part.status}{part.take_cause()}")
        self._show_new_steps()
        if self._stop_signals or read_summary(self.run_dir / "summary.json").get("state") == "stopped":
            return "stopped"
        if self.learner and self.learner.status != 0:
            raise RunFailed(f"learner ended with status {self.learner.status}:\n{self.learner.last_lines()}")
        return "finished"

    def _on_signal(self, number: int, frame) -> None:
        self._stop_signals += 1
        if number == signal.SIGHUP:
            leave_terminal()
        if self._stop_signals > 2:
            raise RunFailed("stopped at once, at the third signal")

    def _ask_to_stop(self) -> None:
        if self.stop_by is None:
            self.view.note(
                "stopping: acknowledged samples are kept, the learner writes a checkpoint; Ctrl-C twice: at once"
            )
            self.stop_by = clock.now() + self._stop_s
        self._next_stop_request_s = clock.now() + ASK_AGAIN_S
        self._stop_run("stopped by the user", "stopped")

    def _stop_run(self, reason: str, state: wire.StopState) -> None:
        """Send the broker a stop request; the caller handles a broker that does not answer."""
        with contextlib.suppress(BrokerUnreachable):
            if connection := self._open_connection():
                connection.request(wire.StopRun(reason, state), HELLO_S)

    # --- showing --------------------------------------------------------------------------------------------

    def _open_connection(self) -> BrokerConnection | None:
        """The connection to the broker, with a session; None while the broker is starting."""
        connection = self.connection
        if connection and not connection.session:
            with contextlib.suppress(BrokerUnreachable):
                connection.hello([], timeout_s=HELLO_S)
        return connection if connection and connection.session else None

    def _poll_status(self) -> None:
        connection = self._open_connection()
        if connection is None:
            return
        if clock.now() >= self._next_status:
            self._next_status = clock.now() + STATUS_S
            connection.send(wire.StatusRequest())
        for received in connection.receive(POLL_MS):
            if connection.is_disowned(received):
                return connection.forget()
            if isinstance(received.message, wire.Status):
                status = orjson.loads(received.arrays[0].tobytes())
                self._is_finished = status["phase"] == "finished"
                self._note_liveness(status)
                self._note_disk(status["read_only"])
                self.start_up.observe(status)
                self._note_evaluations(status["evaluation"])
                self.view.update(status)

    def _note_evaluations(self, evaluations: list[dict]) -> None:
        """Show the user those of all `evaluations`, as the broker's status has them, that were not shown yet."""
        for result in evaluations[self._evaluations :]:
            self.view.note(describe_evaluation(result))
        self._evaluations = max(self._evaluations, len(evaluations))

    def _note_disk(self, read_only: str) -> None:
        if read_only != self._read_only:
            self.view.note(f"READ ONLY: {read_only}" if read_only else "the journal can be written again")
            self._read_only = read_only

    def _note_liveness(self, status: dict) -> None:
        """Note which parts are alive; after a new step, reset the restart counts of the parts that contributed to
        it."""
        now = clock.now()
        if now - self._last_status_s > STALE_STATUS_S or status["read_only"]:
            self._reset_silence()
        self._last_status_s = now
        present = {holder["name"]: holder for holder in (*status["workers"], *status["scorers"], *status["agents"])}
        silent_s = status["learner_silent_s"]
        self.broker.note_heard(now)
        if self.learner and silent_s is not None:
            self.learner.note_heard(now - silent_s)
        for worker in self.workers:
            if worker.name in present:
                worker.note_heard(now)
        at_work = [part for part in self.workers if part.restart_at is None and is_working(present.get(part.name))]
        for worker in at_work:
            worker.note_work(now)
        if status["step"] > self._highest_step:
            self._highest_step = status["step"]
            for part in filter(None, (self.broker, self.learner, *at_work)):
                part.restarts = 0

    def _show_new_steps(self) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        if not metrics.exists():
            return
        with metrics.open("rb") as file:
            self._metrics_read = min(self._metrics_read, metrics.stat().st_size)
            file.seek(self._metrics_read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._metrics_read += len(line)
                if (record := parse_line(line)) and is_step(record):
                    self.view.step(record)


def is_working(holder: dict | None) -> bool:
    """Whether a part, given by its entry in the broker's status, is connected and, if it is a worker, generates
    tokens."""
    return holder is not None and bool(holder.get("tokens_per_s", 1))
