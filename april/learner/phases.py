"""Timers for the phases of a training step."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Seconds = Callable[[str], AbstractContextManager[None]]
"""Maps a phase name to a context manager that times the phase."""


class PhaseSeconds:
    """Wall-clock seconds by phase; synchronises with the accelerator at the end of each phase."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - start


def untimed(phase: str) -> AbstractContextManager[None]:
    return nullcontext()
