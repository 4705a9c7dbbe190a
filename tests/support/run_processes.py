"""Runs April in real processes, which are found and killed by an environment variable that all of them inherit."""

import os
import re
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
    """A command and all processes that it starts. By default they are forks of a process that has already imported
    torch; `start` replaces `Popen`."""

    def __init__(self, command, log: Path, mark=None, start=Popen):
        self.mark = mark or uuid.uuid4().hex
        self.log = log
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            self.process = start(command, stdin=DEVNULL, stdout=output, stderr=output, env=environment)

    @property
    def output(self):
        return self.log.read_text()

    @property
    def restarts(self):
        return restarts(self.output)

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
        """Send SIGKILL to the first `count` processes whose command line contains `pattern`; at least one must
        exist."""
        victims = sorted(self.descendants(pattern))[:count]
        assert victims, f"no process matches {pattern!r}"
        for pid, _ in victims:
            os.kill(pid, signal.SIGKILL)

    def end(self):
        """Kill the command and all processes of the job, also those started meanwhile."""
        wait_until(lambda: not self._kill_all())
        self.process.wait()

    def _kill_all(self):
        found = self.descendants()
        for pid, _ in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


def restarts(output: str) -> list[str]:
    """What a supervisor has written about the parts that it has started again: "restart 1 of 3"."""
    return re.findall(r"restart \d+ of \d+", output)


def wait_until(condition, job=None, timeout_s=PATIENCE_S):
    """Wait until the condition holds. Fails after `timeout_s` or once the job has ended, but only after one more check
    of the condition."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_late, has_ended = time.monotonic() > deadline, job is not None and job.process.poll() is not None
        if condition():
            return
        assert not is_late, f"it never came to that:\n{job.output if job else ''}"
        assert not has_ended, f"the job has ended:\n{job.output}"
        time.sleep(0.05)


def both_workers_are_there(job) -> bool:
    """Whether both workers have loaded the first weights, by the output of `april run`."""
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
