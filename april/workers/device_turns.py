"""The turns of a worker's engine on its accelerator, which the learner has in between."""

import logging
from typing import cast

from april.config import Config
from april.processes import clock
from april.processes.device_turns import EngineTurns, names_here
from april.workers.engines.base import Engine, TurnTaker

log = logging.getLogger(__name__)


class WorkerTurns:
    """Without `devices.turns` the engine always has one, and all of this does nothing."""

    def __init__(self, config: Config, device: str):
        self.patience_s = config.devices.turn_s
        self._turns = EngineTurns(config.run_dir, names_here(device)) if config.devices.turns else None

    def wait(self) -> None:
        """Before there is an engine. Raises TurnLate."""
        if self._turns:
            self._turns.wait(self.patience_s)

    @property
    def has(self) -> bool:
        return self._turns is None or self._turns.has

    @property
    def lasts(self) -> bool:
        """Whether more work may be taken on: the turn is not wanted by the learner."""
        return self._turns is None or (self._turns.has and not self._turns.wanted)

    def gave(self, engine: Engine, loading: bool, staged: bool) -> bool:
        """Give the turn where the learner wants it and nothing runs, nor are weights being loaded; take one where some
        are staged. Whether it has given one."""
        if self._turns is None:
            return False
        began = clock.now()
        if self._turns.has and self._turns.wanted and not engine.live and not loading:
            cast(TurnTaker, engine).release()
            self._turns.give()
            log.info("the engine has let go of the accelerator in %.2f s", clock.now() - began)
            return True
        elif not self._turns.has and staged and self._turns.take():
            cast(TurnTaker, engine).resume()
            log.info("the engine has the accelerator again in %.2f s", clock.now() - began)
        return False
