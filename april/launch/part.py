"""`april part`: one part of a run and its children kept alive on this machine, wherever the other parts are.

What dies is started again, with growing delays. What hangs ends itself, and so dies. A signal is passed on. A broker
that comes back somewhere else is followed, where it is looked for in the run's folder.
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
from april.connections.address import ADDRESS_FILE
from april.launch.devices import environment_of, of_span, visible_devices
from april.processes import clock
from april.processes.lifetime import REFUSED, RUN_FAILED, STEP_ASIDE, STEPPED_ASIDE, SUPERVISED
from april.processes.restarts import STEADY_S, delay_s
from april.words import counted

ROLES = ("broker", "learner", "worker", "scorer", "agents")
OVER = {0: "has come to its end", REFUSED: "refuses to work", RUN_FAILED: "says that the run has failed"}
"""exit statuses after which it is not started again"""
LEAVE_S = 60.0
"""longest wait for a part that was asked to leave, to hand back what it has"""
STOP_S = 600.0
"""the same of a broker, which stops the run, beyond the longest step: the learner writes a checkpoint"""
POLL_S = 0.2


@dataclass(frozen=True)
class Across:
    """One of several machines of the learner."""

    nodes: int
    node: int
    meeting: str = ""
    """HOST:PORT on machine 0, where torchrun's agents meet; none: as the broker tells them"""


def command_of(
    role: str, config: Config, arguments: Sequence[str], connect: str, name: str, across: Across | None
) -> list[str]:
    """The program of a part. `arguments`: configuration files and overrides."""
    joins = [] if role == "broker" else ["--connect", connect]
    if role != "learner":
        named = ["--name", name] if role != "broker" and name else []
        return [sys.executable, "-m", "april.cli", role, *arguments, *joins, *named]
    ranks = config.learner.ranks
    if across is None:
        launch = ["april.learner.launch", "--nproc-per-node", str(ranks)]
    else:
        if ranks % across.nodes or not 0 <= across.node < across.nodes:
            raise ConfigError(
                f"options '--nodes' = {across.nodes} and '--node' = {across.node} do not fit; spread learner.ranks = "
                f"{ranks} evenly over nodes that count from 0"
            )
        launch = [
            "april.learner.across",
            str(across.node),
            f"--nproc-per-node={ranks // across.nodes}",
            f"--nnodes={across.nodes}",
        ]
        launch += ["--rdzv-backend=c10d", f"--rdzv-id={config.run.name}"]
        launch += [f"--rdzv-endpoint={across.meeting}"] if across.meeting else []
        launch += [f"--rdzv-conf=is_host={'false' if across.node else 'true'}"]
    return [sys.executable, "-m", *launch, "-m", "april.learner", *arguments, *joins]


def keep(
    role: str,
    config: Config,
    arguments: Sequence[str],
    connect: str = "",
    name: str = "",
    restarts: int | None = None,
    across: Across | None = None,
    accelerators: str = "",
) -> int:
    """Exit status. `restarts`: most of them without use in between; none: as the configuration says. `accelerators`:
    FIRST:END of those that are here; none: all."""
    if role != "broker" and not connect:
        raise ConfigError("option '--connect' is not given; name the broker as tcp://HOST:PORT, or the run's folder")
    sections = {"broker": config.broker, "learner": config.learner, "scorer": config.scorer, "agents": config.agent}
    limits: Any = sections.get(role, config.worker)
    most = limits.max_restarts if restarts is None else restarts
    follows = Path(connect) if connect and not connect.startswith("tcp://") else None
    keeper = Keeper(
        name or role,
        command_of(role, config, arguments, connect, name, across),
        most,
        say=lambda text: print(f"april part: {text}", file=sys.stderr, flush=True),
        threads=getattr(limits, "threads", 1),
        run_dir=follows,
        leave_s=config.learner.hung_s + STOP_S if role == "broker" else LEAVE_S,
        devices=of_span(accelerators, visible_devices()) if accelerators else (),
    )
    return keeper.run()


class Keeper:
    """Keeps one program alive.

    status = Keeper("worker", command, max_restarts=3, say=print).run()      # that of its last end
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
        """`run_dir`: where the broker is looked for, and followed when it moves; none: it stays where it is.
        `leave_s`: longest wait once it was asked to leave. `devices`: that it sees; none: all."""
        self.name, self.command, self.max_restarts, self.say = name, list(command), max_restarts, say
        self.address_file = run_dir / ADDRESS_FILE if run_dir else None
        own = {SUPERVISED: str(os.getpid()), "OMP_NUM_THREADS": str(threads)}
        self.environment = os.environ | own | environment_of(devices)
        self.leave_s = leave_s
        self.restarts = 0
        self._leave_by: float | None = None
        """when it is killed, once it was asked to leave"""
        self._child: subprocess.Popen | None = None
        self._asked: tuple[int, subprocess.Popen | None] | None = None
        """the last signal, and the process that was sent it"""

    def run(self) -> int:
        leave = (signal.SIGTERM, signal.SIGINT, STEP_ASIDE)
        previous = {number: signal.signal(number, self._on_signal) for number in leave}
        try:
            while True:
                status = self._run_once()
                if self._leave_by is not None or status in OVER:
                    self.say(f"{self.name} {OVER.get(status, f'has left with status {status}')}")
                    return shell_status(status)
                if not self._wait_for_restart(status):
                    return shell_status(status)
        finally:
            self._kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_once(self) -> int:
        """Status at its end; STEPPED_ASIDE where it was ended to look for the broker anew."""
        began, address = clock.now(), self._address()
        self._child = subprocess.Popen(self.command, env=self.environment, start_new_session=True)
        moved_at = None
        if self._asked and self._asked[1] is not self._child:
            self._pass_on(self._asked[0])  # it came while the process was being started
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
        if clock.now() - began >= STEADY_S:
            self.restarts = 0
        ended = self._child.returncode
        self._kill()
        return ended if moved_at is None else STEPPED_ASIDE

    def _wait_for_restart(self, status: int) -> bool:
        """Whether it is to be started again, when that is due."""
        if status == STEPPED_ASIDE:
            return True
        if self.restarts >= self.max_restarts:
            self.say(f"{self.name} ended with status {status}; {counted(self.restarts, 'restart')} brought nothing")
            return False
        self.restarts += 1
        due = clock.now() + delay_s(self.restarts, self.max_restarts)
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
        """Asked to leave: so is the part. Asked again: at once."""
        self._leave_by = clock.now() + (self.leave_s if self._leave_by is None else 0.0)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._asked = number, self._child
        if self._child and self._child.poll() is None:
            self._child.send_signal(number)

    def _kill(self) -> None:
        """With everything that it has started."""
        if self._child:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            finally:
                self._child.wait()


def shell_status(status: int) -> int:
    """As a shell says it: of a program that a signal has ended, 128 and its number."""
    return status if status >= 0 else 128 - status
