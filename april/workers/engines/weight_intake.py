"""Loads the weights received over a weight channel into an engine, and checks that the engine holds them."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np

from april.config import Config
from april.util import clock
from april.weights import TRANSPORTS
from april.weights.canary import Canary
from april.weights.receiver import StagedWeights, WeightReceiver
from april.wire.message import Version
from april.workers.engines.base import AdapterEngine, Engine, EngineError

log = logging.getLogger(__name__)

# --- the weight check -------------------------------------------------------------------------------------------------

MAX_FAILURES = 2
"""Consecutive failed checks after which a worker leaves."""
MOVEMENT_FACTOR = 4.0
"""Multiple of the noise above which a change of the learner's canary log-probabilities counts as movement."""
MIN_NOISE_NATS = 1e-6
"""Lower bound of the noise, the mean difference between engine's and learner's log-probabilities (nats)."""
MIN_FOLLOWED_SHARE = 0.5
"""Least share of the learner's movement that the engine's scores must show."""
NOISE_FACTOR = 4.0
"""Multiple of an engine's usual noise up to which a difference counts as rounding."""
MIN_TOLERANCE_SHARE = 0.1
"""Share of its type's tolerance that an engine has however small its usual noise is."""
USUAL_VERSIONS = 16
"""Number of versions, the last that an engine proved, whose median noise is its usual noise."""


class WrongWeights(EngineError):
    """The engine does not hold the weights it was sent; the text says which test shows that."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference by rounding between learner and engine in a canary token's log-probability (nats)."""

    mean: float
    largest: float

    def narrowed(self, noise: Collection[float]) -> "Tolerance":
        """The tolerance for an engine that proved its last versions with `noise`, in nats and one value a version: this
        one scaled to `NOISE_FACTOR` times their median, or itself if that is larger or no version was proven."""
        if not noise:
            return self
        share = min(1.0, max(MIN_TOLERANCE_SHARE, NOISE_FACTOR * median(noise) / self.mean))
        return Tolerance(share * self.mean, share * self.largest)


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(0.05, 0.4),
    "bfloat16": Tolerance(0.2, 1.5),
}
"""Tolerance by data type. The worst case measured by `benchmarks/canary.py` is 1/25 of it for float32, a quarter for
bfloat16; on an H200 an eighth for float16 (`benchmarks/gpu/band.py`)."""
DEFAULT_TOLERANCE = Tolerance(0.6, 4.0)
"""Tolerance of any other type (8 bits and fewer)."""


@dataclass(frozen=True)
class CanaryScore:
    """The canary's log-probabilities under one version."""

    published: np.ndarray
    """float64 [T - 1]: log-probabilities that the learner has published."""
    scored: np.ndarray
    """float64 [T - 1]: log-probabilities that the engine has computed."""
    checksum: int
    """Checksum of the weights that were scored."""

    @property
    def noise(self) -> float:
        return max(MIN_NOISE_NATS, float(np.abs(self.scored - self.published).mean()))


class WeightCheck:
    """Checks that an engine holds each new version: compares its log-probabilities of the canary with the learner's."""

    def __init__(self) -> None:
        self.failures = 0
        """Number of consecutive failed checks."""
        self._noise: deque[float] = deque(maxlen=USUAL_VERSIONS)
        """Noise of the last proven versions."""
        self._last: CanaryScore | None = None
        self._reference: CanaryScore | None = None
        """Canary score from which movement is measured: that of the newest version that moved beyond the noise."""

    def judge(self, staged: StagedWeights, canary: Canary, scored: np.ndarray, dtype: str) -> None:
        """Check `scored`, float32 [T - 1], the engine's log-probabilities of the canary, computed in `dtype`.

        Raises WrongWeights.
        """
        score = CanaryScore(np.array(canary.logprobs), np.asarray(scored, np.float64), staged.checksum)
        tolerance = tolerance_of(dtype, canary.dtype)
        why = disagreement(score, tolerance.narrowed(self._noise))
        if not why and self._reference:
            why = standstill(self._reference, score)
        if not why and self._last and tolerance == tolerance_of(canary.dtype):  # a coarser engine may round changes off
            why = repetition(self._last, score)
        if why:
            raise self._fail(staged, why)
        log.info("version %s is proven: %.2g nats from the learner in the mean", staged.version, score.noise)
        self.failures, self._last = 0, score
        self._noise.append(score.noise)
        if self._reference is None or has_moved(self._reference, score):
            self._reference = score

    def failure(self, staged: StagedWeights, error: EngineError) -> WrongWeights:
        """The WrongWeights error for an engine that refused to score the canary, or whose score failed `judge`."""
        if isinstance(error, WrongWeights):
            return error
        return self._fail(staged, f"it does not score the canary: {error}")

    def _fail(self, staged: StagedWeights, why: str) -> WrongWeights:
        """Count a failed check and return its error; the reference score stays."""
        self.failures += 1
        return WrongWeights(f"the engine is not seen to hold version {staged.version}: {why}")


def tolerance_of(*dtypes: str) -> Tolerance:
    """Tolerance of the coarsest of several data types."""
    return max((TOLERANCES.get(dtype, DEFAULT_TOLERANCE) for dtype in dtypes), key=lambda tolerance: tolerance.mean)


def disagreement(score: CanaryScore, tolerance: Tolerance) -> str:
    differences = np.abs(score.scored - score.published)
    if differences.mean() <= tolerance.mean and differences.max() <= tolerance.largest:
        return ""
    return (
        f"its log-probabilities of the canary are {differences.mean():.2g} from the learner's in the mean and "
        f"{differences.max():.2g} at most, where {tolerance.mean:.2g} and {tolerance.largest:.2g} are rounding"
    )


def has_moved(since: CanaryScore, score: CanaryScore) -> bool:
    return float(np.abs(score.published - since.published).mean()) > MOVEMENT_FACTOR * since.noise


def standstill(since: CanaryScore, score: CanaryScore) -> str:
    """A sentence if the engine's log-probabilities have not followed the learner's since a reference score, else "".

    The engine's share is the least-squares slope of its per-token movements over the learner's.
    """
    if not has_moved(since, score):
        return ""
    learner, engine = score.published - since.published, score.scored - since.scored
    share = float(engine @ learner / (learner @ learner))
    if share >= MIN_FOLLOWED_SHARE:
        return ""
    return (
        f"the learner's log-probabilities of the canary have moved by {np.abs(learner).mean():.2g} in the mean, and "
        f"the engine's by {share:.0%} of that"
    )


def repetition(last: CanaryScore, score: CanaryScore) -> str:
    moved = np.mean(score.published != last.published)
    if score.checksum == last.checksum or moved < 0.5 or (score.scored != last.scored).any():
        return ""
    return "the learner's log-probabilities of the canary have moved, and the engine's are the same to the bit"


# --- the weight loader ------------------------------------------------------------------------------------------------


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

    @property
    def loading_version(self) -> Version | None:
        """Version of the weights that are being loaded; None if none are."""
        return self._in_progress[0].version if self._in_progress else None

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
        """The canary published with the staged weights; None if the weights are not to be checked."""
        if self.weight_check and staged.canary is None:
            log.warning("the learner has published no canary with %s: nothing is proven", staged.version)
        return staged.canary if self.weight_check else None


def changes_version(engine: Engine, loaders: Sequence[WeightLoader]) -> bool:
    """Whether another version than that of the engine is being loaded into it, or into a server behind it."""
    return any(loader.loading_version not in (None, engine.version) for loader in loaders)


# --- updates put off for held-out samples -----------------------------------------------------------------------------


class UpdateHold:
    """Says how long a worker puts off newer weights, so that an evaluation is of one version: while held-out samples of
    the engine's version run on the worker, or wait for a worker, and at most for `evaluation.hold_s` seconds.

    if hold.holds(engine.version, pending=weights_have_arrived, runs_held_out=...):
        ...  # load nothing
    """

    def __init__(self, config: Config):
        self.hold_s = config.evaluation.hold_s
        """Longest time for which an update is put off, seconds. A trainer that loads the weights itself fails if an
        engine has not stopped by `weights.publish_deadline_s`."""
        if not TRANSPORTS.find(config.weights.transport).carries_weights:
            self.hold_s = min(self.hold_s, config.weights.publish_deadline_s / 2)
        self.waiting: Collection[int] = ()
        """Policy steps at which held-out samples wait for a worker, as the broker says."""
        self._since: float | None = None
        """Time at which the current update was first put off; None if none is."""
        self.active = False
        """Whether an update is put off, as `holds` last said."""

    def is_awaited(self, version: Version | None) -> bool:
        """Whether held-out samples wait for a worker with `version`."""
        return version is not None and version.step in self.waiting

    def holds(self, version: Version | None, pending: bool, runs_held_out: bool) -> bool:
        """Whether an update of an engine with `version` is put off now. `pending`: whether there is one."""
        if not pending or version is None or not (runs_held_out or self.is_awaited(version)):
            self._since = None
        elif self._since is None:
            self._since = clock.now()
        self.active = self._since is not None and clock.now() - self._since < self.hold_s
        return self.active
