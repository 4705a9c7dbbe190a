"""Broker and workers of a configuration as a child process: `april run --without-learner`.

It dies with the trainer, also when that is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from april.config import Config, ConfigError
from april.connections.address import ADDRESS_FILE
from april.processes.lifetime import REFUSED, SUPERVISED

POLL_S = 0.05
END_S = 60.0
"""longest wait for a child that was told to stop; then it is killed"""


class LocalRunFailed(RuntimeError):
    """Broker or workers have failed; the text holds what `april run` has printed."""


class LocalRun:
    """One is begun anew, or, where its folder has a journal, resumed."""

    def __init__(self, config: Config, paths: Sequence[Path], overrides: Sequence[str]):
        run_dir = config.run_dir
        resume = os.path.lexists(run_dir / "journal")
        if run_dir.exists() and not resume:
            raise ConfigError(
                f"key 'run.name' = {config.run.name!r} names a folder in {config.run.dir} that has no journal; "
                "remove it, or give another name"
            )
        self.address_file = run_dir / ADDRESS_FILE
        self._before = self._stamp()
        descriptor, printed = tempfile.mkstemp(prefix="april-", suffix=".log")
        self._printed = Path(printed)
        command = [sys.executable, "-m", "april.cli", "run", "--without-learner", *map(str, paths), *overrides]
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
        """The broker's, once there is one. Raises ConfigError and LocalRunFailed."""
        while self._stamp() in (None, self._before):
            self.check()
            time.sleep(POLL_S)
        return self.address_file.read_text()

    def _stamp(self) -> int | None:
        """When the file was written; None without one."""
        with contextlib.suppress(FileNotFoundError):
            return self.address_file.stat().st_mtime_ns
        return None

    def check(self) -> None:
        """Raise what it has died of, if it has."""
        status = self.process.poll()
        if status in (None, 0):
            return
        printed = self._printed.read_text(errors="replace").strip()
        if status == REFUSED:
            raise ConfigError(printed.removeprefix("april run: "))
        raise LocalRunFailed(f"`april run` ended with status {status}:\n{printed}")

    def wait(self) -> None:
        """Until a run that is over has written its report. Raises LocalRunFailed if it has failed."""
        self.process.wait()
        self.check()
        self._printed.unlink()

    def stop(self) -> None:
        """Whatever is under way is handed back and kept."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._printed.unlink()
