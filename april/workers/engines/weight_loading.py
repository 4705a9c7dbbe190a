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
from april.weights.canary import AT_ONCE, EVIDENCE_LIMIT, SUSPECT, Canary, added_evidence
from april.weights.source import StagedWeights, WeightSource
from april.wire.limits import MAX_CLOCK_SKEW_S
from april.wire.message import Version
from april.workers.engines.base import AdapterEngine, ComparingEngine, Engine, EngineError

log = logging.getLogger(__name__)

# --- the weight check -------------------------------------------------------------------------------------------------

MAX_FAILURES = 2
"""Consecutive failed checks after which a worker gives up and leaves the run."""
LARGEST_FACTOR = 50.0
"""Multiple of the expected rounding beyond which the difference in a single token refuses a version at once."""
USUAL_FACTOR = 2.5
"""Multiple of an engine's usual noise (`USUAL_VERSIONS`) up to which its difference from the learner counts as
rounding."""
MIN_USUAL = 0.25
"""Lower bound of an engine's usual noise (`USUAL_VERSIONS`), as a multiple of the expected rounding."""
USUAL_VERSIONS = 16
"""Number of versions, the last that passed the check, over which the median of `CanaryScore.excess` is the engine's
usual noise."""
MOVEMENT_FACTOR = 4.0
"""Multiple of `CanaryScore.noise` above which the mean change of the learner's canary log-probabilities between two
versions counts as movement."""
MIN_NOISE_NATS = 1e-6
"""Lower bound of the noise, the mean difference between engine's and learner's log-probabilities (nats)."""
MIN_FOLLOWED_SHARE = 0.5
"""Least share of the learner's movement (change of its canary log-probabilities) that the engine's log-probabilities
must show."""
ROUNDING: Mapping[str, float] = {"float32": 4e-5, "float16": 0.02, "bfloat16": 0.08}
"""Expected mean difference by rounding between learner and engine in a canary token's log-probability, by data type
(nats). For the types of 16 bits the learner's own measurement takes its place where there is one."""
OTHER_ROUNDING = 0.24
"""Expected mean difference by rounding for any other type (8 bits and fewer), nats."""
MIN_ROUNDING_16 = 1e-4
"""Least rounding that is expected of a type of 16 bits, nats."""


class WrongWeights(EngineError):
    """The engine does not hold the weights it was sent; the text says which test shows that."""


@dataclass(frozen=True)
class CanaryScore:
    """The canary's log-probabilities under one version."""

    tokens: list[int]
    published: np.ndarray
    """float64 [T - 1]: log-probabilities that the learner has published."""
    scored: np.ndarray
    """float64 [T - 1]: log-probabilities that the engine has computed."""
    digest: str
    """Digest of the weights that were scored."""
    rounding: float
    """Mean difference that rounding is expected to make (nats)."""

    @property
    def noise(self) -> float:
        """Mean difference between engine and learner (nats)."""
        return max(MIN_NOISE_NATS, float(np.abs(self.scored - self.published).mean()))

    @property
    def excess(self) -> float:
        """Mean difference between engine and learner, as a multiple of the expected rounding."""
        return self.noise / self.rounding


class WeightCheck:
    """Checks that an engine holds each new version: compares its log-probabilities of the canary with the learner's,
    and its tensors with those it was sent, where it can.

    Evidence adds up over versions (`april.weights.canary.added_evidence`).
    """

    def __init__(self) -> None:
        self.failures = 0
        """Number of consecutive failed checks."""
        self.evidence = 0.0
        self._usual: deque[float] = deque(maxlen=USUAL_VERSIONS)
        """Mean difference from the learner of each of the last versions that passed the check, as a multiple of the
        expected rounding."""
        self._last: CanaryScore | None = None
        self._reference: CanaryScore | None = None
        """Canary score from which movement is measured: that of the newest version in which the learner moved beyond
        MOVEMENT_FACTOR times the noise, or of the first one."""

    def judge(self, staged: StagedWeights, canary: Canary, scored: np.ndarray, dtype: str) -> None:
        """Compare the engine's log-probabilities of the canary's first T tokens, `scored`, float32 [T - 1], computed in
        `dtype`, with the learner's. Raises WrongWeights if they differ by more than rounding explains."""
        rounding, tokens = expected_rounding(canary, dtype), canary.tokens[: len(scored) + 1]
        published = np.array(canary.logprobs[: len(scored)])
        score = CanaryScore(tokens, published, np.asarray(scored, np.float64), staged.digest, rounding)
        if self._last and self._last.tokens != score.tokens:
            self._last = self._reference = None
        evidence = added_evidence(self.evidence, score.excess)
        why = disagreement(score, evidence, self._usual)
        if not why and self._reference:
            why = standstill(self._reference, score)
        is_exact = type_rounding(dtype, canary.dtype) == type_rounding(canary.dtype)
        if not why and self._last and is_exact:  # a coarser engine may round changes off
            why = repetition(self._last, score)
        if why:
            raise self._fail(staged, why)
        log.info("version %s is proven: %.2g nats from the learner in the mean", staged.version, score.noise)
        self.failures, self._last, self.evidence = 0, score, evidence
        self._usual.append(score.excess)
        if self._reference is None or has_moved(self._reference, score):
            self._reference = score

    def compare(self, staged: StagedWeights, engine: Engine) -> None:
        """Check that the engine holds the staged tensors, if it is a `ComparingEngine`. Raises WrongWeights."""
        if not isinstance(engine, ComparingEngine) or staged.tensors is None or staged.adapter:
            return
        if differing := engine.differing(staged.tensors):
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise self._fail(staged, f"it holds other values than were sent for {', '.join(differing[:3])}{more}")

    def failure(self, staged: StagedWeights, error: EngineError) -> WrongWeights:
        """The WrongWeights error for an engine that refused to score the canary, or whose score failed `judge`."""
        if isinstance(error, WrongWeights):
            return error
        return self._fail(staged, f"it does not score the canary: {error}")

    def _fail(self, staged: StagedWeights, why: str) -> WrongWeights:
        """Count a failed check and return its error; the reference score stays."""
        self.failures += 1
        return WrongWeights(f"the engine is not seen to hold version {staged.version}: {why}")


def scored_text(canary: Canary, engine: Engine) -> np.ndarray:
    """The canary's first tokens, int32 [T], as many as need at most half of the engine's cache."""
    return canary.text if engine.kv_tokens is None else canary.text[: max(2, engine.kv_tokens // 2)]


def type_rounding(*dtypes: str) -> float:
    """Expected mean difference by rounding of the coarsest of several data types (nats)."""
    return max(ROUNDING.get(dtype, OTHER_ROUNDING) for dtype in dtypes)


def expected_rounding(canary: Canary, dtype: str) -> float:
    """Mean difference by rounding between a learner that published `canary` and an engine in `dtype` (nats): as the
    learner has measured it, if one data type has 16 bits and the other at least as many."""
    by_type = type_rounding(dtype, canary.dtype)
    is_16_bit = ROUNDING["float32"] < by_type < OTHER_ROUNDING
    return max(MIN_ROUNDING_16, canary.rounding) if is_16_bit and canary.rounding else by_type


def disagreement(score: CanaryScore, evidence: float, usual: Collection[float]) -> str:
    """A sentence if the canary's log-probabilities of engine and learner differ by more than rounding explains, else
    "". `evidence`: that of wrong weights, this score included (`added_evidence`). `usual`: `excess` of the engine's
    last versions that passed the check; empty: none has."""
    largest = float(np.abs(score.scored - score.published).max())
    apart = (
        f"its log-probabilities of the canary are {score.noise:.2g} from the learner's in the mean and {largest:.2g}"
    )
    limit = min(AT_ONCE, USUAL_FACTOR * max(MIN_USUAL, median(usual))) if usual else AT_ONCE
    mean, at_most = (factor * score.rounding for factor in (limit, LARGEST_FACTOR * limit / AT_ONCE))
    if not (score.noise <= mean and largest <= at_most):
        return f"{apart} at most, where {mean:.2g} and {at_most:.2g} are rounding"
    if evidence > EVIDENCE_LIMIT:
        return (
            f"{apart} at most, after versions that were suspect too; {SUSPECT * score.rounding:.2g} in the mean is "
            "rounding where it lasts"
        )
    return ""


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
    if score.digest == last.digest or moved < 0.5 or (score.scored != last.scored).any():
        return ""
    return "the learner's log-probabilities of the canary have moved, and the engine's are the same to the bit"


# --- the weight loader ------------------------------------------------------------------------------------------------


class WeightLoader:
    """Loads weights into an in-process engine, at once, between two of its steps."""

    def __init__(self, engine: Engine, receiver: WeightSource, weight_check: WeightCheck | None = None):
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
        return min(max(0.0, clock.now() - staged.started_at), MAX_CLOCK_SKEW_S)  # the clock may have jumped

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
        """Check the engine's weights, and discard them if the check fails. Raises WrongWeights then."""
        check, canary = self.weight_check, self.canary_of(staged)
        if not (check and canary):
            return
        try:
            check.compare(staged, self.engine)
            check.judge(staged, canary, self.engine.score(scored_text(canary, self.engine)), self.engine.dtype)
        except EngineError as error:
            self.engine.discard_weights()
            raise check.failure(staged, error) from None

    def canary_of(self, staged: StagedWeights) -> Canary | None:
        """The canary published with the staged weights; None if the weights are not to be checked."""
        if self.weight_check and staged.canary is None:
            log.warning("the learner has published no canary with %s: nothing is proven", staged.version)
        return staged.canary if self.weight_check else None


def changes_version(engine: Engine, loaders: Sequence[WeightLoader]) -> bool:
    """Whether a version other than the engine's is being loaded into it, or into one of its servers."""
    return any(loader.loading_version not in (None, engine.version) for loader in loaders)


# --- updates put off for held-out samples -----------------------------------------------------------------------------


class UpdateHold:
    """Decides how long a worker puts off newer weights, so that an evaluation is of one version: while held-out samples
    of the engine's version run on the worker, or wait for a worker, and at most for `evaluation.hold_s` seconds.

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
        """Policy steps at which held-out samples wait for a worker, as the broker last reported."""
        self._since: float | None = None
        """Time at which the current update was first put off; None if none is."""
        self.active = False
        """Whether an update is put off, as `holds` last returned."""

    def is_awaited(self, version: Version | None) -> bool:
        """Whether held-out samples wait for a worker with `version`."""
        return version is not None and version.step in self.waiting

    def holds(self, version: Version | None, pending: bool, runs_held_out: bool) -> bool:
        """Whether an update of an engine with `version` is put off now. `pending`: whether an update waits.
        `runs_held_out`: whether held-out samples run on the engine."""
        if not pending or version is None or not (runs_held_out or self.is_awaited(version)):
            self._since = None
        elif self._since is None:
            self._since = clock.now()
        self.active = self._since is not None and clock.now() - self._since < self.hold_s
        return self.active
