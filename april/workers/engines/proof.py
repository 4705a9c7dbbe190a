"""Proof that an engine holds the weights it was sent: it scores the canary before anything is leased to it.

    proof = Proof()
    proof.judge(staged, canary, engine.score(canary.text), engine.dtype)      # raises WrongWeights

Three questions, each of which alone finds an engine that samples from other weights:

- Does it say what the learner says, but for what the coarser of their types rounds away?
- Where the learner's log-probabilities have moved by more than the noise since an earlier version, did the engine's
  move along?
- Where the learner's have moved at all, did the engine's? The same bits again are the same weights again.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from april.weights.canary import Canary
from april.weights.receiver import Staged
from april.workers.engines.base import EngineError

log = logging.getLogger(__name__)

FAILURES = 2
"""in a row, after which a worker leaves"""
MOVED = 4.0
"""times the noise, from which on a movement is told from it"""
NOISE = 1e-6
"""nats; the least that is taken for it"""
FOLLOWED = 0.5
"""least share of the learner's movement that the engine's must have"""


class WrongWeights(EngineError):
    """The engine does not hold what it was sent; the text says how that is seen."""


@dataclass(frozen=True)
class Band:
    """How far two right log-probabilities of a token of the canary may be apart (nats)."""

    mean: float
    largest: float


BANDS: Mapping[str, Band] = {
    "float32": Band(1e-4, 1e-3),
    "float16": Band(0.05, 0.4),
    "bfloat16": Band(0.2, 1.5),
}
"""By the type that is computed in. Of `benchmarks/canary.py`, float32 is 25 times, bfloat16 four times what was
measured at worst; float16 has three bits more than bfloat16, and was not measured."""
COARSEST = Band(0.6, 4.0)
"""of any other type: 8 bits and fewer"""


@dataclass(frozen=True)
class Score:
    """The canary under one version."""

    published: np.ndarray
    """float64 [T - 1], the learner's"""
    scored: np.ndarray
    """float64 [T - 1], the engine's"""
    checksum: int
    """of the weights"""

    @property
    def noise(self) -> float:
        return max(NOISE, float(np.abs(self.scored - self.published).mean()))


class Proof:
    """Of one engine, version after version."""

    def __init__(self) -> None:
        self.failures = 0
        """in a row"""
        self._last: Score | None = None
        self._anchor: Score | None = None
        """what movement is measured from: the newest version at which it could be told from the noise"""

    def judge(self, staged: Staged, canary: Canary, scored: np.ndarray, dtype: str) -> None:
        """`scored`: float32 [T - 1], what an engine that computes in `dtype` says of the canary. Raises
        WrongWeights."""
        score = Score(np.array(canary.logprobs), np.asarray(scored, np.float64), staged.checksum)
        why = disagreement(score, band_of(dtype, canary.dtype))
        if not why and self._anchor:
            why = standstill(self._anchor, score)
        if not why and self._last and dtype == canary.dtype:
            why = repetition(self._last, score)
        if why:
            raise self._fail(staged, why)
        log.info("version %s is proven: %.2g nats from the learner in the mean", staged.version, score.noise)
        self.failures, self._last = 0, score
        if self._anchor is None or has_moved(self._anchor, score):
            self._anchor = score

    def failure(self, staged: Staged, error: EngineError) -> WrongWeights:
        """What an engine's refusal to score the canary comes to, as well as `judge` of its score."""
        if isinstance(error, WrongWeights):
            return error
        return self._fail(staged, f"it does not score the canary: {error}")

    def _fail(self, staged: Staged, why: str) -> WrongWeights:
        """What movement is measured from stays."""
        self.failures += 1
        return WrongWeights(f"the engine is not seen to hold version {staged.version}: {why}")


def band_of(*dtypes: str) -> Band:
    """Of the coarsest of the types."""
    return max((BANDS.get(dtype, COARSEST) for dtype in dtypes), key=lambda band: band.mean)


def disagreement(score: Score, band: Band) -> str:
    apart = np.abs(score.scored - score.published)
    if apart.mean() <= band.mean and apart.max() <= band.largest:
        return ""
    return (
        f"its log-probabilities of the canary are {apart.mean():.2g} from the learner's in the mean and "
        f"{apart.max():.2g} at most, where {band.mean:g} and {band.largest:g} are rounding"
    )


def has_moved(since: Score, score: Score) -> bool:
    return float(np.abs(score.published - since.published).mean()) > MOVED * since.noise


def standstill(since: Score, score: Score) -> str:
    """The share is the slope of the engine's movements over the learner's."""
    if not has_moved(since, score):
        return ""
    learner, engine = score.published - since.published, score.scored - since.scored
    share = float(engine @ learner / (learner @ learner))
    if share >= FOLLOWED:
        return ""
    return (
        f"the learner's log-probabilities of the canary have moved by {np.abs(learner).mean():.2g} in the mean, and "
        f"the engine's by {share:.0%} of that"
    )


def repetition(last: Score, score: Score) -> str:
    moved = np.mean(score.published != last.published)
    if score.checksum == last.checksum or moved < 0.5 or (score.scored != last.scored).any():
        return ""
    return "the learner's log-probabilities of the canary have moved, and the engine's are the same to the bit"
