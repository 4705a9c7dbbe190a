"""Run broker and workers as a child process, `april run --without-learner`, which ends with the trainer even if the
trainer is killed."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from april.config import Config, ConfigError
from april.util.errors import refuse
from april.util.lifetime import REFUSED, SUPERVISED, reap
from april.util.registry import python_command
from april.wire.sockets.base import ADDRESS_FILE

POLL_S = 0.05
STOP_TIMEOUT_S = 60.0
"""Time after which a child process that was asked to stop is killed, seconds."""


class LocalRunFailed(RuntimeError):
    """Raised when broker or workers of a local run have failed; the text holds the output of `april run`."""


class LocalRun:
    """The child process `april run --without-learner`. It begins a new run, or resumes the run whose folder has a
    journal."""

    def __init__(self, config: Config, paths: Sequence[Path], overrides: Sequence[str]):
        run_dir = config.run_dir
        resume = os.path.lexists(run_dir / "journal")
        if run_dir.exists() and not resume:
            refuse(
                "run.name",
                config.run.name,
                f"names a folder in {config.run.dir} that has no journal",
                "remove it, or give another name",
            )
        self.address_file = run_dir / ADDRESS_FILE
        self._previous_ns = self._modified_ns()
        descriptor, output_path = tempfile.mkstemp(prefix="april-", suffix=".log")
        self._output_file = Path(output_path)
        command = python_command("-m", "april.cli", "run", "--without-learner", *map(str, paths), *overrides)
        with os.fdopen(descriptor, "wb") as output:
            self.process = subprocess.Popen(
                command + ["--resume"] * resume,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {SUPERVISED: str(os.getpid())},
                start_new_session=True,
            )

    def address(self) -> str:
        """The broker's address; waits for the broker to start. Raises ConfigError and LocalRunFailed."""
        while self._modified_ns() in (None, self._previous_ns):
            self.check()
            time.sleep(POLL_S)
        return self.address_file.read_text()

    def _modified_ns(self) -> int | None:
        """Modification time of the broker's address file, nanoseconds; None without the file."""
        with contextlib.suppress(FileNotFoundError):
            return self.address_file.stat().st_mtime_ns
        return None

    def check(self) -> None:
        """Raises ConfigError or LocalRunFailed if the child process has failed."""
        status = self.process.poll()
        if status in (None, 0):
            return
        output = self._output_file.read_text(errors="replace").strip()
        if status == REFUSED:
            raise ConfigError(output.removeprefix("april run: "))
        raise LocalRunFailed(f"`april run` ended with status {status}:\n{output}")

    def wait(self) -> None:
        """Wait until the finished run has written its report. Raises LocalRunFailed if it has failed."""
        self.process.wait()
        self.check()
        self._output_file.unlink()

    def stop(self) -> None:
        """Stop the run; workers return unfinished samples to the broker, which keeps them in the journal."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            reap(self.process)
        self._output_file.unlink()
