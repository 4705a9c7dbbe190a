"""`april part`: keeps one part of a run alive on this machine, wherever the other parts are.

A part that dies is restarted with growing delays; a part that hangs ends itself. Signals are passed on. If the broker
restarts at another address, and its address is read from the run's folder, the part is restarted to follow it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.config import Config, ConfigError
from april.launch.devices import devices_in_span, environment_of, visible_devices
from april.util import clock
from april.util.errors import refuse
from april.util.lifetime import (
    REFUSED,
    RUN_FAILED,
    STEADY_S,
    STEP_ASIDE,
    STEPPED_ASIDE,
    SUPERVISED,
    reap,
    restart_delay_s,
)
from april.util.registry import python_command
from april.util.text import counted
from april.wire.sockets.base import ADDRESS_FILE

ROLES = ("broker", "learner", "worker", "scorer", "agents")
OVER = {0: "has come to its end", REFUSED: "refuses to work", RUN_FAILED: "says that the run has failed"}
"""Exit statuses after which a part is not restarted, with their meaning."""
LEAVE_S = 60.0
"""Longest wait for a part that was asked to stop, while it returns its samples, seconds."""
STOP_S = 600.0
"""Longest wait for a broker that was asked to stop, in addition to `learner.hung_s`, seconds: meanwhile the learner
writes a checkpoint."""
POLL_S = 0.2


@dataclass(frozen=True)
class LearnerNode:
    """One of the learner's machines, when it has several."""

    nodes: int
    """Number of machines."""
    node: int
    """Index of this machine, from 0."""
    rendezvous: str = ""
    """HOST:PORT on machine 0 where the ranks meet; empty: the broker announces it."""


def command_of(
    role: str, config: Config, arguments: Sequence[str], connect: str, name: str, learner_node: LearnerNode | None
) -> list[str]:
    """Command line of a part's program. `arguments`: configuration files and overrides; `connect`: the broker's address
    or the run folder; `name`: the part's, for a worker, scorer or agents process. Raises ConfigError."""
    connect_arguments = [] if role == "broker" else ["--connect", connect]
    if role != "learner":
        name_arguments = ["--name", name] if role != "broker" and name else []
        return python_command("-m", "april.cli", role, *arguments, *connect_arguments, *name_arguments)
    ranks = config.learner.ranks
    if learner_node is None:
        launch = ["april.learner.launch", "--nproc-per-node", str(ranks)]
    else:
        if ranks % learner_node.nodes or not 0 <= learner_node.node < learner_node.nodes:
            raise ConfigError(
                f"options '--nodes' = {learner_node.nodes} and '--node' = {learner_node.node} do not fit; spread "
                f"learner.ranks = {ranks} evenly over nodes that count from 0"
            )
        launch = [
            "april.learner.multi_node",
            f"--node={learner_node.node}",
            f"--nnodes={learner_node.nodes}",
            f"--nproc-per-node={ranks // learner_node.nodes}",
        ]
        launch += [f"--meeting={learner_node.rendezvous}"] if learner_node.rendezvous else []
    return python_command("-m", *launch, "-m", "april.learner", *arguments, *connect_arguments)


def supervise_part(
    role: str,
    config: Config,
    arguments: Sequence[str],
    connect: str = "",
    name: str = "",
    restarts: int | None = None,
    learner_node: LearnerNode | None = None,
    accelerators: str = "",
) -> int:
    """Run a part until it ends; returns its exit status. `arguments`: configuration files and overrides for the part;
    `connect`: the broker's address or the run folder; `name`: the part's name, empty: that of its role. `restarts`:
    maximum number of consecutive restarts; None: as configured. `accelerators`: span FIRST:END of the visible
    accelerators; empty: all. Raises ConfigError."""
    if role != "broker" and not connect:
        refuse("--connect", None, "is not given", "name the broker as tcp://HOST:PORT, or the run's folder")
    sections = {"broker": config.broker, "learner": config.learner, "scorer": config.scorer, "agents": config.agent}
    limits: Any = sections.get(role, config.worker)
    max_restarts = limits.max_restarts if restarts is None else restarts
    run_dir = Path(connect) if connect and "://" not in connect else None
    supervisor = PartSupervisor(
        name or role,
        command_of(role, config, arguments, connect, name, learner_node),
        max_restarts,
        say=lambda text: print(f"april part: {text}", file=sys.stderr, flush=True),
        threads=getattr(limits, "threads", 1),
        run_dir=run_dir,
        leave_s=config.learner.hung_s + STOP_S if role == "broker" else LEAVE_S,
        devices=devices_in_span(accelerators, visible_devices()) if accelerators else (),
    )
    return supervisor.run()


class PartSupervisor:
    """Restarts one program until it ends for good.

    status = PartSupervisor("worker", command, max_restarts=3, say=print).run()      # its last exit status
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        max_restarts: int,
        say: Callable[[str], None],
        threads: int = 1,
        run_dir: Path | None = None,
        leave_s: float = LEAVE_S,
        devices: Sequence[str] = (),
    ):
        """`name`: of the part, for messages; `command`: of the program; `max_restarts`: restarts in a row until the
        part is given up. `say`: prints a line. `threads`: OMP_NUM_THREADS of the program. `run_dir`: folder with the
        broker's address file, which is watched for changes; None: the address is fixed. `leave_s`: longest wait for the
        program after a request to stop. `devices`: accelerators visible to the program; empty: all."""
        self.name, self.command, self.max_restarts, self.say = name, list(command), max_restarts, say
        self.address_file = run_dir / ADDRESS_FILE if run_dir else None
        own = {SUPERVISED: str(os.getpid()), "OMP_NUM_THREADS": str(threads)}
        self.environment = os.environ | own | environment_of(devices)
        self.leave_s = leave_s
        self.restarts = self._starts = 0
        self._began = 0.0
        """Time of the program's latest start, Unix seconds; 0 before the first."""
        self._leave_by: float | None = None
        """Time at which the program is killed after a request to stop, Unix seconds; None before the request."""
        self._child: subprocess.Popen | None = None
        self._asked: tuple[int, subprocess.Popen | None] | None = None
        """(last stop signal, process that the signal was passed on to); None before the first signal."""

    def run(self) -> int:
        leave = (signal.SIGTERM, signal.SIGINT, STEP_ASIDE)
        previous = {number: signal.signal(number, self._on_signal) for number in leave}
        try:
            while True:
                status = self._run_once()
                if self._leave_by is not None or (status in OVER and not self._passes(status)):
                    self.say(f"{self.name} {OVER.get(status, f'has left with status {status}')}")
                    return shell_status(status)
                if not self._wait_for_restart(status):
                    return shell_status(status)
        finally:
            self._kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _passes(self, status: int) -> bool:
        """Whether the exit status `status` is a refusal (REFUSED) that may be temporary: it came soon after a restart
        of a program that has worked before. The broker may be starting again, or a disk may not answer. The next start
        counts as one of the restarts."""
        return status == REFUSED and self._starts > 1 and clock.now() - self._began < STEADY_S

    def _run_once(self) -> int:
        """Run the program once; returns its exit status, or STEPPED_ASIDE if this supervisor has ended it because the
        broker has moved to another address."""
        self._began, address = clock.now(), self._address()
        self._starts += 1
        self._child = subprocess.Popen(self.command, env=self.environment, start_new_session=True)
        moved_at = None
        if self._asked and self._asked[1] is not self._child:
            self._pass_on(self._asked[0])  # the signal came while the process was being started
        while self._child.poll() is None:
            now = clock.now()
            if self._leave_by is not None and now >= self._leave_by:
                self._kill()
            if moved_at is None and address and self._address() not in (address, ""):
                self.say(f"the broker has moved from {address}; {self.name} follows it")
                moved_at = now
                self._child.terminate()
            if moved_at is not None and now - moved_at > LEAVE_S:
                self._kill()
            try:
                self._child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
        if clock.now() - self._began >= STEADY_S:
            self.restarts = 0
        ended = self._child.returncode
        self._kill()
        return ended if moved_at is None else STEPPED_ASIDE

    def _wait_for_restart(self, status: int) -> bool:
        """Wait for the delay before a restart; returns whether to restart. `status`: exit status of the program, which
        has ended."""
        if status == STEPPED_ASIDE:
            return True
        if self.restarts >= self.max_restarts:
            self.say(f"{self.name} ended with status {status}; {counted(self.restarts, 'restart')} did not help")
            return False
        self.restarts += 1
        due = clock.now() + restart_delay_s(self.restarts, self.max_restarts)
        self.say(f"{self.name} ended with status {status}; restart {self.restarts} of {self.max_restarts}")
        while clock.now() < due and self._leave_by is None:
            signal.sigtimedwait([], POLL_S)
        return self._leave_by is None

    def _address(self) -> str:
        try:
            return self.address_file.read_text() if self.address_file else ""
        except OSError:
            return ""

    def _on_signal(self, number: int, frame: object) -> None:
        """Pass the signal on; the program is killed after `leave_s`, or at once at the second signal."""
        self._leave_by = clock.now() + (self.leave_s if self._leave_by is None else 0.0)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._asked = number, self._child
        if self._child and self._child.poll() is None:
            self._child.send_signal(number)

    def _kill(self) -> None:
        """Kill the program and all its child processes."""
        if self._child:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            finally:
                reap(self._child)


def shell_status(status: int) -> int:
    """Exit status in a shell's convention: 128 + n for a program ended by signal n."""
    return status if status >= 0 else 128 - status
