"""The embedded engine with an accelerator's sense of time: its tokens are real, its steps last as a cost model says.

A step ends no earlier than the model's a + b * running + c * KV, and the prefill of what it took in, times a factor by
which the CPU keeps up. Steps of a busy engine follow each other without a gap, as an accelerator's would: what the
worker does between two of them is part of the second. A step that could not be made in time is counted; where those are
more than a few, the run's times are the CPU's and not the model's.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from torch import Tensor

from april.config.costs import Pacing
from april.processes import clock
from april.wire.version import Version
from april.workers.engines.base import Chunk
from april.workers.engines.embedded.decoder import Decoder
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.embedded.slot_table import DecodeBatch

log = logging.getLogger(__name__)

LATE_SHARE = 0.01
"""of the steps; a run with more of them late says so"""
TELL_S = 2.0
"""between two writings of what was kept and what was not"""


@dataclass
class Pace:
    """How well the pace was kept."""

    hardware: str
    """the cost model's source"""
    factor: float
    """seconds that pass here for one of the model's"""
    steps: int = 0
    late_steps: int = 0
    """that took longer than the model says"""
    late_s: float = 0.0
    """by so much, all together"""


class PacedEngine(TorchEngine):
    def __init__(self, model_path: str | Path, pacing: Pacing, factor: float, told_in: Path, **options: Any):
        """`told_in`: file that says how well the pace was kept; `options`: of `TorchEngine`."""
        super().__init__(model_path, **options)
        self.pacing, self.pace, self._told_in = pacing, Pace(pacing.cost.source, factor), told_in
        self._contexts = self._context_tokens = self._kv = 0
        """computed in the step under way, and in the cache before it"""
        self._due = 0.0
        """when the last step was over, by the model"""
        self._tell_at = 0.0
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
        self._contexts += len(self._unfilled)
        self._context_tokens += int(self._table.length[self._unfilled].sum())
        super()._prefill(decoder)

    def _decode(self, decoder: Decoder, batch: DecodeBatch) -> np.ndarray:
        self._kv = int(batch.lengths.sum())
        return super()._decode(decoder, batch)

    def _wait_until(self, due: float) -> None:
        now, pace = clock.now(), self.pace
        pace.steps += 1
        if now > due:
            pace.late_steps += 1
            pace.late_s += now - due
        else:
            time.sleep(due - now)
        self._due = max(now, due)
        if now >= self._tell_at:
            self._tell_at = now + TELL_S
            self._tell()

    def _tell(self) -> None:
        self._told_in.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._told_in.with_suffix(".partial")
        unfinished.write_bytes(orjson.dumps(asdict(self.pace)))
        unfinished.replace(self._told_in)

    def close(self) -> None:
        pace = self.pace
        if pace.steps:
            self._tell()
        if pace.late_steps > LATE_SHARE * pace.steps:
            log.warning(
                "%d of %d paced steps were late: times are this machine's, not the model's; raise engine.pace_factor",
                pace.late_steps,
                pace.steps,
            )
        super().close()
