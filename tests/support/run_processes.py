"""Real runs in real processes, found and killed by the environment variable that they all inherit."""

import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired

import orjson

from april.observe.report.run_folder import read_records
from tests.support.warm_imports import MARK, Popen

PATIENCE_S = 180.0
APRIL = [sys.executable, "-m", "april.cli"]


class Job:
    """A command and everything it starts, in processes that need not import torch first unless `start` is another."""

    def __init__(self, command, log: Path, mark=None, start=Popen):
        self.mark = mark or uuid.uuid4().hex
        self.log = log
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            self.process = start(command, stdin=DEVNULL, stdout=output, stderr=output, env=environment)

    @property
    def output(self):
        return self.log.read_text()

    def wait(self, timeout_s=PATIENCE_S):
        try:
            return self.process.wait(timeout_s)
        except TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None

    def descendants(self, pattern=""):
        """(pid, command line) of the living processes of this job whose command line contains the pattern."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().decode(errors="replace")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if command and pattern in command and f"{MARK}={self.mark}" in command + environment:
                found.append((int(folder.name), command))
        return found

    def kill(self, pattern, count=1):
        """SIGKILL the first processes that match; at least one must be there."""
        victims = sorted(self.descendants(pattern))[:count]
        assert victims, f"no process matches {pattern!r}"
        for pid, _ in victims:
            os.kill(pid, signal.SIGKILL)

    def end(self):
        """Kill the process and its children, also those started meanwhile; some may die with their parent first."""
        wait_until(lambda: not self._kill_all())
        self.process.wait()

    def _kill_all(self):
        found = self.descendants()
        for pid, _ in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


def wait_until(condition, job=None, timeout_s=PATIENCE_S):
    """A job may have come to it before it ended, and a test may be away until its time is over: it looks once more."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_late, has_ended = time.monotonic() > deadline, job is not None and job.process.poll() is not None
        if condition():
            return
        assert not is_late, f"it never came to that:\n{job.output if job else ''}"
        assert not has_ended, f"the job has ended:\n{job.output}"
        time.sleep(0.05)


def both_workers_are_there(job) -> bool:
    """Wait until a worker has the first weights, by the output of `april run`."""
    return all(f"worker-{index} has the weights 0.0" in job.output for index in (0, 1))


def steps_recorded(run_dir: Path) -> int:
    return len(read_records(run_dir / "metrics.jsonl"))


def summary(run_dir: Path) -> dict:
    return orjson.loads((run_dir / "summary.json").read_bytes())


def assert_closed(run_dir: Path) -> dict:
    """Check that generated = trained + delivered + ready + open + discarded; returns the summary."""
    found = summary(run_dir)
    tokens = found["tokens"]
    parts = sum(tokens[name] for name in ("trained", "delivered", "ready", "open")) + sum(tokens["discarded"].values())
    assert tokens["generated"] == parts > 0
    assert found["ledger_closed"] is True
    return found
