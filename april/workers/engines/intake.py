"""Loads the weights received over a weight channel into an engine, and checks that the engine holds them."""

import asyncio
import logging
from concurrent.futures import Future
from typing import cast

from april.processes import clock
from april.weights.canary import Canary
from april.weights.receiver import StagedWeights, WeightReceiver
from april.workers.engines.base import AdapterEngine, Engine, EngineError
from april.workers.engines.proof import MAX_FAILURES, WeightCheck, WrongWeights

log = logging.getLogger(__name__)


class WeightLoader:
    """Loads weights into an in-process engine, at once, between two of its steps."""

    def __init__(self, engine: Engine, receiver: WeightReceiver, weight_check: WeightCheck | None = None):
        """`weight_check`: None to load without a check."""
        self.engine = engine
        self.receiver = receiver
        self.weight_check = weight_check
        self._in_progress: tuple[StagedWeights, Future | asyncio.Task] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether weights are being loaded, or staged for loading."""
        return self._in_progress is not None or self.receiver.has_staged

    @property
    def is_loading(self) -> bool:
        """Whether weights are being loaded."""
        return self._in_progress is not None

    def load(self) -> float | None:
        """Load staged weights, or continue loading them; called in every pass of the worker's loop.

        Returns the time from their announcement until they were loaded (s), or None if no load has finished. An engine
        that has lost its weights, or fails the weight check, gets them again. Raises WrongWeights after `MAX_FAILURES`
        consecutive failures.
        """
        engine, receiver = self.engine, self.receiver
        if self._in_progress is None and engine.ready:
            if engine.version is None and receiver.held is not None:
                receiver.forget()
            if staged := receiver.take():
                self._in_progress = staged, self.start_load(staged)
        if self._in_progress is None or not self._in_progress[1].done():
            return None
        (staged, loading), self._in_progress = self._in_progress, None
        try:
            loading.result()
        except EngineError as error:
            log.error("weights %s were not loaded: %s", staged.version, error)
            wrong = isinstance(error, WrongWeights)
            receiver.refuse(str(error), wrong)
            if wrong and self.weight_check and self.weight_check.failures >= MAX_FAILURES:
                raise
            return None
        receiver.loaded(staged.version)
        return clock.now() - staged.started_at

    def start_load(self, staged: StagedWeights) -> Future | asyncio.Task:
        loading: Future[None] = Future()
        try:
            if staged.adapter:
                cast(AdapterEngine, self.engine).load_adapter(staged.version, staged.adapter, staged.tensors or {})
            else:
                self.engine.load_weights(staged.version, staged.tensors or {})
            self._check_weights(staged)
            loading.set_result(None)
        except EngineError as error:
            loading.set_exception(error)
        return loading

    def _check_weights(self, staged: StagedWeights) -> None:
        """Raises WrongWeights if the check fails, after discarding the engine's weights."""
        check, canary = self.weight_check, self.canary_of(staged)
        if not (check and canary):
            return
        try:
            check.judge(staged, canary, self.engine.score(canary.text), self.engine.dtype)
        except EngineError as error:
            self.engine.discard_weights()
            raise check.failure(staged, error) from None

    def canary_of(self, staged: StagedWeights) -> Canary | None:
        """The canary published with these weights, if they are to be checked."""
        if self.weight_check and staged.canary is None:
            log.warning("the learner has published no canary with %s: nothing is proven", staged.version)
        return staged.canary if self.weight_check else None
