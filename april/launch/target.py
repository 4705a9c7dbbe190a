"""Launch targets: where `april run` starts the parts of a run. The shipped one is this machine."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Program(Protocol):
    """Handle of a started process."""

    def status(self) -> int | None:
        """Exit status; None while it runs."""

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process to end, at most `timeout_s`; returns its exit status, None if it still runs."""

    def kill(self) -> None:
        """Kill the process and its child processes."""


class Target:
    """Interface of a launch target."""

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Program:
        """Start the part `name`. `environment`: changes to this process's environment; `log`: file that takes its
        output, read by `april run` and the report.

        The process must see the run folder under the same path, and reach broker.bind and weights.host.
        """
        raise NotImplementedError


class LocalTarget(Target):
    """Starts child processes of this process, each in its own process group."""

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
