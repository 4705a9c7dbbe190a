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
"""Limit on the difference between engine and learner in the log-probability of a single token of the canary (the fixed
text that both score), as a multiple of the mean difference that rounding is expected to make. A version above it is
refused at once."""
USUAL_FACTOR = 2.5
"""Limit on the mean difference between engine and learner under a new version, as a multiple of the engine's noise: the
median of that difference over the last `USUAL_VERSIONS` versions that passed the check."""
MIN_USUAL = 0.25
"""Lower bound of the engine's noise, to which `USUAL_FACTOR` is applied, as a multiple of the mean difference that
rounding is expected to make between engine and learner."""
USUAL_VERSIONS = 16
"""Number of versions from which an engine's noise is estimated: the median of `CanaryScore.excess` over the last ones
that passed the check."""
MOVEMENT_FACTOR = 4.0
"""The learner has moved between two versions if the mean change of its log-probabilities of the canary, a fixed text,
is above this multiple of `CanaryScore.noise`."""
MIN_NOISE_NATS = 1e-6
"""Lower bound of `CanaryScore.noise`, the mean difference between the log-probabilities of engine and learner
(nats)."""
MIN_FOLLOWED_SHARE = 0.5
"""Least share with which a version passes the check: the change of the engine's log-probabilities of the canary, a
fixed text, since an earlier version, divided by the change of the learner's."""
ROUNDING: Mapping[str, float] = {"float32": 4e-5, "float16": 0.02, "bfloat16": 0.08}
"""Mean difference (nats) that rounding is expected to make between learner and engine in the log-probability of a token
of the canary, by data type. If the learner has measured this difference itself, its value is used for types of 16
bits."""
OTHER_ROUNDING = 0.24
"""Mean difference (nats) that rounding is expected to make between learner and engine in the log-probability of a token
of the canary, a fixed text, for the data types that `ROUNDING` does not name, which have 8 bits and fewer."""
MIN_ROUNDING_16 = 1e-4
"""Lower bound of the mean difference that rounding is expected to make for a type of 16 bits (nats)."""


class WrongWeights(EngineError):
    """The engine does not hold the weights it was sent; the text says which test shows that."""


@dataclass(frozen=True)
class CanaryScore:
    """Log-probabilities of the canary, a fixed text of T tokens, under one version of the weights: the learner's and
    the engine's."""

    tokens: list[int]
    published: np.ndarray
    """float64 [T - 1]: log-probabilities of the canary's tokens after the first, as the learner has published them."""
    scored: np.ndarray
    """float64 [T - 1]: log-probabilities of the canary's tokens after the first, as the engine has computed them."""
    digest: str
    """Digest of the weights under which the engine has scored the canary."""
    rounding: float
    """Mean difference (nats) that rounding is expected to make between engine and learner in the log-probabilities of
    the canary's tokens."""

    @property
    def noise(self) -> float:
        """Mean absolute difference between the log-probabilities of engine and learner (nats), at least
        MIN_NOISE_NATS."""
        return max(MIN_NOISE_NATS, float(np.abs(self.scored - self.published).mean()))

    @property
    def excess(self) -> float:
        """`noise` as a multiple of `rounding`, the difference that rounding is expected to make."""
        return self.noise / self.rounding


class WeightCheck:
    """Checks that an engine holds each new version. It compares the engine's log-probabilities of the canary, a fixed
    text, with the learner's, and if the engine can (`ComparingEngine`), its tensors with those it was sent.

    Small differences that each pass as rounding add up over versions to evidence of wrong weights
    (`april.weights.canary.added_evidence`).
    """

    def __init__(self) -> None:
        self.failures = 0
        """Number of consecutive failed checks."""
        self.evidence = 0.0
        self._usual: deque[float] = deque(maxlen=USUAL_VERSIONS)
        """`CanaryScore.excess` of each of the last versions that passed the check: the mean difference between engine
        and learner, as a multiple of the difference that rounding is expected to make."""
        self._last: CanaryScore | None = None
        self._reference: CanaryScore | None = None
        """Score of an earlier version, compared with which the engine's log-probabilities have to have changed as the
        learner's have: that of the first version that passed the check; later that of each version whose learner's
        log-probabilities differ clearly from those of the reference before (MOVEMENT_FACTOR)."""

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
        """Check that the engine holds the staged tensors. Raises WrongWeights if it does not. Checks nothing for an
        engine that cannot compare tensors (is no `ComparingEngine`), nor for an adapter."""
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
        """Count a failed check of the version `staged`, and return its error, with the reason `why`. The earlier scores
        with which new ones are compared stay as they are."""
        self.failures += 1
        return WrongWeights(f"the engine is not seen to hold version {staged.version}: {why}")


def scored_text(canary: Canary, engine: Engine) -> np.ndarray:
    """The canary's first T tokens, int32 [T], for the engine to score. T is limited so that they need at most half of
    the engine's cache."""
    return canary.text if engine.kv_tokens is None else canary.text[: max(2, engine.kv_tokens // 2)]


def type_rounding(*dtypes: str) -> float:
    """Mean difference (nats) that rounding is expected to make in log-probabilities, by `ROUNDING`, for the coarsest of
    several data types."""
    return max(ROUNDING.get(dtype, OTHER_ROUNDING) for dtype in dtypes)


def expected_rounding(canary: Canary, dtype: str) -> float:
    """Mean difference (nats) that rounding is expected to make between the learner that has published `canary` and an
    engine that computes in `dtype`. It is the learner's own measurement if one of the two data types has 16 bits and
    the other at least as many, otherwise that of `ROUNDING`."""
    by_type = type_rounding(dtype, canary.dtype)
    is_16_bit = ROUNDING["float32"] < by_type < OTHER_ROUNDING
    return max(MIN_ROUNDING_16, canary.rounding) if is_16_bit and canary.rounding else by_type


def disagreement(score: CanaryScore, evidence: float, usual: Collection[float]) -> str:
    """A sentence if the log-probabilities of the canary by engine and learner differ by more than rounding explains,
    else "". `evidence`: sum over the versions so far, this score included, that shows wrong weights above a limit
    (`added_evidence`). `usual`: `excess` of the engine's last versions that passed the check; empty before the
    first."""
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
    """A sentence if the engine's log-probabilities of the canary have not followed the learner's between the scores
    `since` and `score`, else "".

    The engine follows by a share: the least-squares slope of its changes per token over the learner's. Less than
    MIN_FOLLOWED_SHARE is refused.
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
        """`receiver`: where the weights come from. `weight_check`: None to load without a check."""
        self.engine = engine
        self.receiver = receiver
        self.weight_check = weight_check
        self._in_progress: tuple[StagedWeights, Future | asyncio.Task] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether weights are being loaded, or have arrived and wait to be loaded."""
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
        """Load weights that have arrived, or continue loading them; called in every pass of the worker's loop.

        Returns the seconds from the announcement of the weights until they were loaded, or None if no load has finished
        in this call. An engine that has lost its weights, or fails the weight check, gets them again. Raises
        WrongWeights after `MAX_FAILURES` consecutive failed checks.
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
        """The canary (text and log-probabilities) that the learner has published with the staged weights; None if there
        is none, or if the weights are not to be checked."""
        if self.weight_check and staged.canary is None:
            log.warning("the learner has published no canary with %s: nothing is proven", staged.version)
        return staged.canary if self.weight_check else None


def changes_version(engine: Engine, loaders: Sequence[WeightLoader]) -> bool:
    """Whether a version other than the engine's is being loaded into it, or into one of its servers."""
    return any(loader.loading_version not in (None, engine.version) for loader in loaders)


# --- updates put off for held-out samples -----------------------------------------------------------------------------


class UpdateHold:
    """Decides how long a worker puts off newer weights, so that all held-out samples of an evaluation are of one
    version. It does so while held-out samples of the engine's version run on the worker, or wait for a worker, but for
    at most `evaluation.hold_s` seconds.

    if hold.holds(engine.version, pending=weights_have_arrived, runs_held_out=...):
        ...  # load nothing
    """

    def __init__(self, config: Config):
        self.hold_s = config.evaluation.hold_s
        """Longest time for which an update is put off, seconds. If a trainer loads the weights itself, it is at most
        half of `weights.publish_deadline_s`, after which the trainer fails if an engine has not stopped."""
        if not TRANSPORTS.find(config.weights.transport).carries_weights:
            self.hold_s = min(self.hold_s, config.weights.publish_deadline_s / 2)
        self.waiting: Collection[int] = ()
        """Policy steps for which the broker has last reported held-out samples that wait for a worker with that step's
        weights."""
        self._since: float | None = None
        """Time at which the current update was first put off; None if none is."""
        self.active = False
        """Whether an update is put off, as `holds` last returned."""

    def is_awaited(self, version: Version | None) -> bool:
        """Whether held-out samples of an evaluation wait for a worker with the weights of `version`."""
        return version is not None and version.step in self.waiting

    def holds(self, version: Version | None, pending: bool, runs_held_out: bool) -> bool:
        """Whether a worker should put off, now, the update of an engine that has the weights of `version`. `pending`:
        whether newer weights wait to be loaded. `runs_held_out`: whether held-out samples of an evaluation run on the
        engine."""
        if not pending or version is None or not (runs_held_out or self.is_awaited(version)):
            self._since = None
        elif self._since is None:
            self._since = clock.now()
        self.active = self._since is not None and clock.now() - self._since < self.hold_s
        return self.active
