"""Time sharing of one accelerator between a worker's engine and the learner, from the worker's side."""

import logging
from typing import cast

from april.config import Config
from april.util import clock
from april.util.time_sharing import EngineTimeSharing, accelerator_names
from april.workers.engines.base import Engine, TimeSharingEngine

log = logging.getLogger(__name__)


class WorkerTimeSharing:
    """The periods in which a worker's engine may use an accelerator that it shares with the learner. Without
    `devices.turns` nothing is shared: the engine always holds the device."""

    def __init__(self, config: Config, device: str):
        self.patience_s = config.devices.turn_s
        self._slices = EngineTimeSharing(config.run_dir, accelerator_names(device)) if config.devices.turns else None

    def wait(self) -> None:
        """Wait for the first period in which the engine may use the accelerator, before the engine is built. Raises
        TimeSliceLate after `devices.turn_s` seconds."""
        if self._slices:
            self._slices.wait(self.patience_s)

    @property
    def holds_device(self) -> bool:
        return self._slices is None or self._slices.has_slice

    @property
    def keeps_device(self) -> bool:
        """Whether the engine may take on more work: it holds the accelerator, and the learner does not wait for it."""
        return self._slices is None or (self._slices.has_slice and not self._slices.is_requested)

    def switch(self, engine: Engine, loading: bool, staged: bool) -> bool:
        """Release the device if the learner waits and the engine is idle; acquire it if new weights are staged.

        `loading`: weights are being loaded, which delays a release. `staged`: new weights wait to be loaded. Returns
        whether the device was released.
        """
        if self._slices is None:
            return False
        began = clock.now()
        if self._slices.has_slice and self._slices.is_requested and not engine.live and not loading:
            cast(TimeSharingEngine, engine).release()
            self._slices.release()
            log.info("the engine has released the accelerator in %.2f s", clock.now() - began)
            return True
        elif not self._slices.has_slice and staged and self._slices.take():
            cast(TimeSharingEngine, engine).resume()
            log.info("the engine has the accelerator again in %.2f s", clock.now() - began)
        return False
