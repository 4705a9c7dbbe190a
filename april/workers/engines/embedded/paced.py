"""The embedded engine at the pace of an accelerator: its tokens are real, its steps last as long as a cost model says.

A step ends no earlier than the cost model's time for it: a + b * running + c * KV tokens, plus the prefill of admitted
requests, times a slow-down factor with which the CPU can keep up. Steps of a busy engine follow each other without a
gap, so the worker's own work between two steps counts as part of the second. Steps that took longer than the model says
are counted; if their share is above LATE_SHARE, the run's times are the CPU's, not the model's.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from april.config.costs import Pacing
from april.util import clock
from april.wire.message import Version
from april.workers.engines.base import Chunk
from april.workers.engines.embedded.decoder import Decoder
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.embedded.slot_table import DecodeBatch, DecodeStep

log = logging.getLogger(__name__)

LATE_SHARE = 0.01
"""Share of late steps above which the engine logs a warning."""
STATUS_INTERVAL_S = 2.0
"""Interval between two writes of the status file (s)."""


@dataclass
class Pace:
    """Statistics of how well the engine has kept the cost model's pace."""

    hardware: str
    """Hardware that the cost model was measured on."""
    factor: float
    """Real seconds per second of the cost model."""
    steps: int = 0
    late_steps: int = 0
    """Number of steps that took longer than the cost model says."""
    late_s: float = 0.0
    """Total lateness of the late steps (s)."""


class PacedEngine(TorchEngine):
    def __init__(self, model_path: str | Path, pacing: Pacing, factor: float, status_file: Path, **options: Any):
        """`pacing`: the cost model. `factor`: real seconds per second of the cost model. `status_file`: JSON file for
        the `Pace` statistics. `options`: those of `TorchEngine`."""
        super().__init__(model_path, **options)
        self.pacing, self.pace, self._status_file = pacing, Pace(pacing.cost.source, factor), status_file
        self._contexts = self._context_tokens = self._kv = 0
        """Three numbers of the current step: contexts that were prefilled, tokens in these contexts, and KV tokens that
        the running sequences attend over."""
        self._due = 0.0
        """Time at which the last step had to end according to the cost model (Unix seconds)."""
        self._next_status_at = 0.0
        self._was_busy = False

    def step(self) -> list[Chunk]:
        began = self._due if self._was_busy else clock.now()
        self._contexts = self._context_tokens = 0
        generated = self.generated_tokens
        chunks = super().step()
        if running := self.generated_tokens - generated:
            cost = self.pacing.cost
            seconds = cost.context_s(self._contexts, self._context_tokens) + cost.steps_s(1, running, self._kv)
            self._wait_until(began + self.pace.factor * seconds)
        self._was_busy = bool(running and self.live)
        return chunks

    def load_weights(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        began = clock.now()
        super().load_weights(version, tensors)
        time.sleep(max(0.0, began + self.pace.factor * self.pacing.update_s - clock.now()))
        self._was_busy = False

    def _prefill(self, decoder: Decoder) -> None:
        self._contexts += len(self._awaiting_prefill)
        self._context_tokens += int(self._table.length[self._awaiting_prefill].sum())
        super()._prefill(decoder)

    def _launch(self, decoder: Decoder, batch: DecodeBatch) -> DecodeStep:
        self._kv = int(batch.lengths.sum())
        return super()._launch(decoder, batch)

    def _wait_until(self, due: float) -> None:
        now, pace = clock.now(), self.pace
        pace.steps += 1
        if now > due:
            pace.late_steps += 1
            pace.late_s += now - due
        else:
            time.sleep(due - now)
        self._due = max(now, due)
        if now >= self._next_status_at:
            self._next_status_at = now + STATUS_INTERVAL_S
            self._write_status()

    def _write_status(self) -> None:
        self._status_file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._status_file.with_suffix(".partial")
        unfinished.write_bytes(orjson.dumps(asdict(self.pace)))
        unfinished.replace(self._status_file)

    def close(self) -> None:
        pace = self.pace
        if pace.steps:
            self._write_status()
        if pace.late_steps > LATE_SHARE * pace.steps:
            log.warning(
                "%d of %d paced steps were late: times are this machine's, not the model's; raise engine.pace_factor",
                pace.late_steps,
                pace.steps,
            )
        super().close()
