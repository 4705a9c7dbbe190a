"""The learner's turns on its accelerator: its state is there within them, and on the host in between.

turn = Turn(config, device, rank)
turn.take()                       # before there is anything on the device
...                               # load, gather the weights
turn.give(trainer)                # engines may generate with them
figures = turn.take()             # a batch has come, and no engine holds memory any more
"""

import logging
import os
import time

import torch
import torch.distributed as dist

from april.config import Config
from april.learner.parking import Parking
from april.learner.trainer import Trainer
from april.processes.device_turns import LearnerTurns, names_here
from april.processes.pulse import MAIN

log = logging.getLogger(__name__)


class Turn:
    """Without `devices.turns` there is always one, and all of this does nothing."""

    def __init__(self, config: Config, device: torch.device, rank: int):
        self.patience_s = config.devices.turn_s
        names = names_here(device.type)
        own = names[device.index : device.index + 1] if device.type == "cuda" else names[rank:]
        self._turns = LearnerTurns(config.run_dir, own) if config.devices.turns else None
        self._parking = Parking(device, config.run_dir)
        self._gave_s = 0.0

    def take(self, meeting: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Wait for one, and, of a learner that has state already, for the other ranks in `meeting`, and have the state
        back; figures about it. Raises TurnLate."""
        if self._turns is None or self._turns.has:
            return {}
        MAIN.at("waiting for the accelerator", takes_long=True)
        waited_s, began = self._turns.take(self.patience_s), time.perf_counter()
        if meeting:
            dist.barrier(meeting)
        self._parking.unpark()
        return {"turn_wait_s": waited_s, "turn_move_s": self._gave_s + time.perf_counter() - began}

    def give(self, trainer: Trainer) -> None:
        if self._turns is None:
            return
        MAIN.at("leaving the accelerator", takes_long=True)
        began = time.perf_counter()
        parked = self._parking.park(trainer.held())
        self._turns.give()
        self._gave_s = time.perf_counter() - began
        log.info("%d bytes of state lie on the host in the engines' turn (process %d)", parked, os.getpid())
