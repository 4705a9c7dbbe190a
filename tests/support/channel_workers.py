"""Worker processes at the ends of weight channels, and the weights that they are sent."""

import queue
import signal
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from tests.support.run_processes import wait_until
from tests.support.warm_imports import Popen

PATIENCE_S = 60.0


class ChannelWorker:
    """A worker process that prints the versions it loads."""

    def __init__(self, address, transport, name, *model):
        script = Path(__file__).with_name("channel_worker.py")
        self.process = Popen([sys.executable, script, address, transport, name, *model], stdout=PIPE, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def has_started(self):
        return self.next_line() == "started"

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def next_line(self, timeout_s=PATIENCE_S):
        return self.lines.get(timeout=timeout_s)

    def await_version(self, version):
        """The sum of the worker's tensors in `version`; earlier versions are skipped."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found, total = self.next_line().split()
            if found == str(version):
                return float(total)
        raise AssertionError(f"{version} never arrived")

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def weights(step, size=200_000):
    generator = torch.Generator().manual_seed(step)
    return {
        "a": torch.randn(size, generator=generator),
        "b": torch.randn(3, 5, generator=generator).bfloat16(),
        "empty": torch.zeros(0),
    }


def total(step):
    return pytest.approx(sum(float(t.double().sum()) for t in weights(step).values()), abs=1e-4)


def take(receiver):
    staged = []
    wait_until(lambda: staged.append(receiver.take()) or staged[-1])
    return staged[-1]
