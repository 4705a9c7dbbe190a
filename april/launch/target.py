"""Launch targets: where `april run` starts the parts of a run. Shipped is this machine alone."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Program(Protocol):
    """A part that was started, for as long as it runs and after its end."""

    def status(self) -> int | None:
        """Exit status; None while it runs."""

    def wait(self, timeout_s: float) -> int | None:
        """The same, when it has ended or the time is over."""

    def kill(self) -> None:
        """End it at once, with everything that it has started."""


class Target:
    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Program:
        """Start the part `name`. `environment`: what differs from this process's own; `log`: takes its output, and is
        read by `april run` and the report.

        What it runs in sees the run folder under the same path, and reaches broker.bind and weights.host.
        """
        raise NotImplementedError


class LocalTarget(Target):
    """A child of this process, in a process group of its own."""

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> "LocalProgram":
        with log.open("ab") as output:
            return LocalProgram(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | environment,
                    start_new_session=True,
                )
            )


class LocalProgram:
    def __init__(self, process: subprocess.Popen):
        self.process = process

    def status(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
