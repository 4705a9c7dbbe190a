"""What has arrived through a lane is loaded into a worker's engine."""

import asyncio
import logging
from concurrent.futures import Future

from april.processes import clock
from april.weights.receiver import Staged, WeightReceiver
from april.workers.engines.base import Engine, EngineError

log = logging.getLogger(__name__)


class Intake:
    """Into an engine at once, between two of its steps."""

    def __init__(self, engine: Engine, receiver: WeightReceiver):
        self.engine = engine
        self.receiver = receiver
        self._under_way: tuple[Staged, Future | asyncio.Task] | None = None

    def load(self) -> float | None:
        """Load what has arrived whole; how long that took since its announcement (seconds), None if none was loaded.

        An engine that has lost what it had gets it again.
        """
        engine, receiver = self.engine, self.receiver
        if self._under_way is None and engine.ready:
            if engine.version is None and receiver.held is not None:
                receiver.forget()
            if staged := receiver.take():
                self._under_way = staged, self.begin(staged)
        if self._under_way is None or not self._under_way[1].done():
            return None
        (staged, loading), self._under_way = self._under_way, None
        try:
            loading.result()
        except EngineError as error:
            log.error("weights %s were not loaded: %s", staged.version, error)
            receiver.refuse(str(error))
            return None
        receiver.loaded(staged.version)
        return clock.now() - staged.started_at

    def begin(self, staged: Staged) -> Future | asyncio.Task:
        loading: Future[None] = Future()
        try:
            self.engine.load_weights(staged.version, staged.tensors or {})
            loading.set_result(None)
        except EngineError as error:
            loading.set_exception(error)
        return loading
