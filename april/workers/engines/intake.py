"""What has arrived through a lane is loaded into a worker's engine, which must then show that it holds it."""

import asyncio
import logging
from concurrent.futures import Future
from typing import cast

from april.processes import clock
from april.weights.canary import Canary
from april.weights.receiver import Staged, WeightReceiver
from april.workers.engines.base import AdapterTaker, Engine, EngineError
from april.workers.engines.proof import FAILURES, Proof, WrongWeights

log = logging.getLogger(__name__)


class Intake:
    """Into an engine at once, between two of its steps."""

    def __init__(self, engine: Engine, receiver: WeightReceiver, proof: Proof | None = None):
        """`proof`: none where it is not asked for."""
        self.engine = engine
        self.receiver = receiver
        self.proof = proof
        self._under_way: tuple[Staged, Future | asyncio.Task] | None = None

    @property
    def loading(self) -> bool:
        """Whether weights are being loaded, or about to be."""
        return self._under_way is not None or self.receiver.has_staged

    @property
    def under_way(self) -> bool:
        """Whether weights are being loaded."""
        return self._under_way is not None

    def load(self) -> float | None:
        """Load what has arrived whole; how long that took since its announcement (seconds), None if none was loaded.

        An engine that has lost what it had gets it again, and so does one that does not hold what it was sent. Raises
        WrongWeights where that is so `FAILURES` times in a row.
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
            wrong = isinstance(error, WrongWeights)
            receiver.refuse(str(error), wrong)
            if wrong and self.proof and self.proof.failures >= FAILURES:
                raise
            return None
        receiver.loaded(staged.version)
        return clock.now() - staged.started_at

    def begin(self, staged: Staged) -> Future | asyncio.Task:
        loading: Future[None] = Future()
        try:
            if staged.adapter:
                cast(AdapterTaker, self.engine).load_adapter(staged.version, staged.adapter, staged.tensors or {})
            else:
                self.engine.load_weights(staged.version, staged.tensors or {})
            self._prove(staged)
            loading.set_result(None)
        except EngineError as error:
            loading.set_exception(error)
        return loading

    def _prove(self, staged: Staged) -> None:
        """Raises WrongWeights, with an engine that has none any more."""
        proof, canary = self.proof, self.canary_of(staged)
        if not (proof and canary):
            return
        try:
            proof.judge(staged, canary, self.engine.score(canary.text), self.engine.dtype)
        except EngineError as error:
            self.engine.disown()
            raise proof.failure(staged, error) from None

    def canary_of(self, staged: Staged) -> Canary | None:
        """What these weights are proven by, where they have to be."""
        if self.proof and staged.canary is None:
            log.warning("the learner has published no canary with %s: nothing is proven", staged.version)
        return staged.canary if self.proof else None
