"""Weight check: before an engine gets samples under new weights, it scores the canary, and must agree with the learner.

    check = WeightCheck()
    check.judge(staged, canary, engine.score(canary.text), engine.dtype)      # raises WrongWeights

The canary is a fixed text whose log-probabilities the learner publishes with each version. Three tests, each of which
alone detects an engine that samples from other weights:

- Disagreement: do the engine's log-probabilities equal the learner's, up to rounding in the coarser of the two types?
- Standstill: if the learner's have moved by more than the noise since a reference version, have the engine's too?
- Repetition: if the learner's have changed at all, have the engine's? Bit-identical scores mean identical weights.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from april.weights.canary import Canary
from april.weights.receiver import StagedWeights
from april.workers.engines.base import EngineError

log = logging.getLogger(__name__)

MAX_FAILURES = 2
"""Consecutive failed checks after which a worker leaves."""
MOVEMENT_FACTOR = 4.0
"""A movement counts as one above this multiple of the noise."""
MIN_NOISE_NATS = 1e-6
"""Lower bound of the noise estimate (nats)."""
MIN_FOLLOWED_SHARE = 0.5
"""Least share of the learner's movement that the engine's scores must show."""


class WrongWeights(EngineError):
    """The engine does not hold the weights it was sent; the text says which test shows that."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference by rounding between learner and engine in a canary token's log-probability (nats)."""

    mean: float
    largest: float


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(0.05, 0.4),
    "bfloat16": Tolerance(0.2, 1.5),
}
"""Tolerance by data type. The worst case measured by `benchmarks/canary.py` is 1/25 of it for float32, a quarter for
bfloat16. float16, with three more bits than bfloat16, was not measured."""
DEFAULT_TOLERANCE = Tolerance(0.6, 4.0)
"""Tolerance of any other type (8 bits and fewer)."""


@dataclass(frozen=True)
class CanaryScore:
    """The canary's log-probabilities under one version."""

    published: np.ndarray
    """float64 [T - 1]: the learner's."""
    scored: np.ndarray
    """float64 [T - 1]: the engine's."""
    checksum: int
    """Checksum of the weights."""

    @property
    def noise(self) -> float:
        return max(MIN_NOISE_NATS, float(np.abs(self.scored - self.published).mean()))


class WeightCheck:
    """The check of one engine, version after version."""

    def __init__(self) -> None:
        self.failures = 0
        """Consecutive failures."""
        self._last: CanaryScore | None = None
        self._reference: CanaryScore | None = None
        """Score from which movement is measured: that of the newest version whose movement exceeded the noise."""

    def judge(self, staged: StagedWeights, canary: Canary, scored: np.ndarray, dtype: str) -> None:
        """Check `scored`, float32 [T - 1], the engine's log-probabilities of the canary, computed in `dtype`.

        Raises WrongWeights.
        """
        score = CanaryScore(np.array(canary.logprobs), np.asarray(scored, np.float64), staged.checksum)
        why = disagreement(score, tolerance_of(dtype, canary.dtype))
        if not why and self._reference:
            why = standstill(self._reference, score)
        if not why and self._last and dtype == canary.dtype:
            why = repetition(self._last, score)
        if why:
            raise self._fail(staged, why)
        log.info("version %s is proven: %.2g nats from the learner in the mean", staged.version, score.noise)
        self.failures, self._last = 0, score
        if self._reference is None or has_moved(self._reference, score):
            self._reference = score

    def failure(self, staged: StagedWeights, error: EngineError) -> WrongWeights:
        """The WrongWeights error for an engine that refused to score the canary, or whose score failed `judge`."""
        if isinstance(error, WrongWeights):
            return error
        return self._fail(staged, f"it does not score the canary: {error}")

    def _fail(self, staged: StagedWeights, why: str) -> WrongWeights:
        """Count a failure; the reference score stays."""
        self.failures += 1
        return WrongWeights(f"the engine is not seen to hold version {staged.version}: {why}")


def tolerance_of(*dtypes: str) -> Tolerance:
    """Tolerance of the coarsest of the types."""
    return max((TOLERANCES.get(dtype, DEFAULT_TOLERANCE) for dtype in dtypes), key=lambda tolerance: tolerance.mean)


def disagreement(score: CanaryScore, tolerance: Tolerance) -> str:
    differences = np.abs(score.scored - score.published)
    if differences.mean() <= tolerance.mean and differences.max() <= tolerance.largest:
        return ""
    return (
        f"its log-probabilities of the canary are {differences.mean():.2g} from the learner's in the mean and "
        f"{differences.max():.2g} at most, where {tolerance.mean:g} and {tolerance.largest:g} are rounding"
    )


def has_moved(since: CanaryScore, score: CanaryScore) -> bool:
    return float(np.abs(score.published - since.published).mean()) > MOVEMENT_FACTOR * since.noise


def standstill(since: CanaryScore, score: CanaryScore) -> str:
    """Compare the movements since a reference score.

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
