"""The alarms that ship with April: about a run's operation, the policy's responses and how much each counts in
training, and the engines' weights."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, ClassVar

from april.broker.peers import PeerLoop
from april.broker.telemetry.alarm import Alarm, ConsecutiveAlarm

# --- operation --------------------------------------------------------------------------------------------------------


FEWEST_LOOKS = 4
"""Fewest occupancy measurements of the slots in a step from which their mean is used."""


def waiting_share(record: dict[str, Any]) -> float:
    """Share of the learner's time in which it waited for a batch."""
    learner = record.get("learner") or {}
    waited_s, trained_s = learner.get("wait_s") or 0.0, learner.get("train_s") or 0.0
    return waited_s / (waited_s + trained_s) if waited_s + trained_s else 0.0


def measured_slots(record: dict[str, Any]) -> dict[str, float]:
    """Occupancy of the workers' slots in a step's record; empty without slots, or if the step was too short for a
    mean."""
    slots = record.get("slots") or {}
    return slots if slots.get("slots") and slots.get("looks", 0) >= FEWEST_LOOKS else {}


class StalenessAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.25
    """Share of a batch's tokens as old as `schedule.max_staleness` permits, above which the alarm is raised; only where
    it permits at least 2 steps."""

    def wrong(self, record: dict[str, Any]) -> str:
        staleness = record.get("staleness") or {}
        bound, by_age = staleness.get("bound", 0), staleness.get("tokens_by_age", {})
        at_bound = sum(tokens for age, tokens in by_age.items() if int(age) >= bound)
        share = at_bound / max(1, sum(by_age.values()))
        if bound < 2 or share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the tokens are as old as the bound of {bound} steps permits, and it sets the pace: start "
            "less at once (schedule.over_sampling_batch_size, schedule.in_flight), or raise schedule.max_staleness"
        )


class StarvedEnginesAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.2
    """Share of busy slots below which the alarm is raised, if the learner also waited for more than half of its
    time."""

    def wrong(self, record: dict[str, Any]) -> str:
        slots = measured_slots(record)
        if not slots or slots["busy"] >= self.threshold or waiting_share(record) <= 0.5:
            return ""
        return (
            f"only {slots['busy']:.0%} of {slots['slots']:.0f} slots were busy while the learner waited "
            f"{waiting_share(record):.0%} of the time: start more at once (schedule.over_sampling_batch_size, or "
            "a schedule.kind that goes on while the learner trains), or give fewer slots"
        )


class SaturatedEnginesAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 8.0
    """Number of waiting samples per slot above which the alarm is raised, if all slots are busy and the learner waited
    for more than half of its time."""

    def wrong(self, record: dict[str, Any]) -> str:
        slots = measured_slots(record)
        if not slots or slots["busy"] < 0.95 or waiting_share(record) <= 0.5:
            return ""
        queue = slots["waiting"] / slots["slots"]
        if queue <= self.threshold:
            return ""
        return (
            f"{queue:.0f} samples wait for each of {slots['slots']:.0f} slots, which are all busy, and the learner "
            f"waits {waiting_share(record):.0%} of the time: add workers, or start less at once"
        )


class DiskFillingAlarm(Alarm):
    page = "docs/operations.md#what-to-do-when"
    threshold = 3600.0
    """Seconds until the disk is full, at the rate of the last steps, below which the alarm is raised."""
    least_bytes = 2 << 30
    """Free bytes on the disk below which the alarm is raised at any rate."""
    least_s = 60.0
    """Least seconds over which the rate of disk use is measured."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque(maxlen=20)

    def look(self, record: dict[str, Any]) -> str:
        free = record.get("disk_free_bytes")
        if free is None:
            return ""
        self.seen.append((record["time"], free))
        (began, free_before), remaining_s = self.seen[0], float("inf")
        if record["time"] - began >= self.least_s and free < free_before:
            remaining_s = free * (record["time"] - began) / (free_before - free)
        if remaining_s >= self.threshold and free >= self.least_bytes:
            return ""
        when = f", and is full in {remaining_s / 60:.0f} minutes at this pace" if remaining_s < self.threshold else ""
        return (
            f"the disk of the run folder has {free / 1e9:.1f} GB left{when}: make room, lower learner.checkpoint_every "
            "so that the journal is reclaimed sooner, or samples.max_mb"
        )


USUAL_STEPS, FEWEST_STEPS = 31, 3
"""Number of newest steps whose median duration is the usual one, and least number of steps for a median."""


class SlowPartAlarm(Alarm):
    """Raised when a training step, or a stage of some process's main loop, takes ten times as long as usual."""

    page = "docs/operations.md#what-to-do-when"
    threshold = 10
    """Multiple of the usual duration above which a step or stage is slow."""
    least_s = 10.0
    """Duration in seconds below which nothing is slow."""

    def __init__(self) -> None:
        self.steps_s: deque[float] = deque(maxlen=USUAL_STEPS)

    def look(self, record: dict[str, Any]) -> str:
        took_s, before = (record.get("learner") or {}).get("train_s") or 0.0, list(self.steps_s)
        self.steps_s.append(took_s)
        if len(before) < FEWEST_STEPS or not self._is_slow(took_s, median(before)):
            return ""
        return (
            f"training took {took_s:.0f} s where {median(before):.2g} s are usual; look what else the learner's "
            "machine does, and how long the longest responses have become"
        )

    def watch(self, loops: Sequence[PeerLoop]) -> str:
        slow = [loop for loop in loops if loop.usual_s and self._is_slow(loop.for_s, loop.usual_s)]
        if not slow:
            return ""
        peer, position, for_s, usual_s = max(slow, key=lambda loop: loop.for_s)
        return (
            f"{peer} has been at {position!r} for {for_s:.0f} s where {usual_s:.2g} s are usual; read its log; it is "
            "ended and started again if it gets nowhere for the `hung_s` of its section"
        )

    def _is_slow(self, took_s: float, usual_s: float) -> bool:
        return took_s > max(self.least_s, self.threshold * usual_s)


# --- the policy's responses, and their weight in training -------------------------------------------------------------


class PolicyGapAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.05
    """Largest k3 estimate, in nats, of the KL divergence between the trained policy and the versions that sampled its
    tokens."""

    def wrong(self, record: dict[str, Any]) -> str:
        gap = (record.get("learner") or {}).get("k3") or 0.0
        if gap <= self.threshold:
            return ""
        return (
            f"the policy is {gap:.2g} nats from the one that sampled what it trains (up to {self.threshold:g} is usual)"
            ": lower schedule.max_staleness or learner.lr, or correct more by algorithm.corrections"
        )


class EffectiveSamplesAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    usual: ClassVar = {"ess": 0.5, "weight_ess": 0.25}
    """Least usual effective sample size as a share of the trained tokens, by metric. `ess`: of the ratios of the
    trained policy to the sampling versions; `weight_ess`: of the importance weights that corrections applied."""

    def wrong(self, record: dict[str, Any]) -> str:
        learner = record.get("learner") or {}
        few = [name for name, least in self.usual.items() if learner.get(name) is not None and learner[name] < least]
        if not few:
            return ""
        share, least = learner[few[0]], self.usual[few[0]]
        return (
            f"a few tokens outweigh the others: they count as {share:.0%} of what is trained ({few[0]}, {least:.0%} "
            "and more are usual): lower schedule.max_staleness or learner.lr, or weigh stale tokens otherwise by "
            "algorithm.corrections"
        )


class LengthBiasAlarm(ConsecutiveAlarm):
    page = "docs/operations.md#the-alarm-on-lengths"
    threshold = 1.5
    """Distance between trained and created response lengths above which the alarm is raised, as a multiple of the
    largest distance that chance explains."""

    def wrong(self, record: dict[str, Any]) -> str:
        drift = (record.get("lengths") or {}).get("drift")
        if not drift or drift["distance"] <= self.threshold * drift["band"]:
            return ""
        return (
            f"what is trained has other lengths than what is created (distance {drift['distance']:.2f}, by chance up "
            f"to {drift['band']:.2f}): look for what discards by length, a filter, a time limit of a verifier, or "
            "workers that die on long responses"
        )


class LoopingAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.2
    """Share of a batch's responses that end in a loop of repeated tokens, above which the alarm is raised."""

    def wrong(self, record: dict[str, Any]) -> str:
        share = (record.get("learner") or {}).get("looping_share") or 0.0
        if share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the responses end in a loop, the same tokens again and again: read "
            "`april samples --worst 5`; a higher sampling.temperature, a lower learner.lr, or a reward against loops"
        )


class EntropyCollapseAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.1
    """Entropy below which the alarm is raised, as a fraction of the mean entropy of the first steps."""
    first = 3
    """Number of first steps with which later steps are compared."""
    gain = 0.02
    """Gain in mean reward since the first steps above which the alarm is not raised: a better policy may be more
    certain."""

    def __init__(self) -> None:
        super().__init__()
        self.entropies: list[float] = []
        self.rewards: list[float] = []

    def wrong(self, record: dict[str, Any]) -> str:
        entropy, reward = (record.get("learner") or {}).get("entropy"), record.get("reward", 0.0)
        if entropy is None:
            return ""
        if len(self.entropies) < self.first:
            self.entropies.append(entropy)
            self.rewards.append(reward)
            return ""
        before = sum(self.entropies) / self.first
        if entropy >= self.threshold * before or reward > sum(self.rewards) / self.first + self.gain:
            return ""
        return (
            f"the entropy of the policy has fallen from {before:.2g} to {entropy:.2g} nats without a better reward: it "
            "hardly tries anything any more; a lower learner.lr, a higher algorithm.clip_high, or an earlier checkpoint"
        )


class NothingTrainedAlarm(Alarm):
    """Raised by steps in which no sample has a gradient, because the rewards within every group are equal."""

    page = "docs/start/troubleshooting.md#it-learns-badly"
    threshold = 3
    """Number of steps in a row without a token that has a gradient, at which the alarm is raised."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def look(self, record: dict[str, Any]) -> str:
        share = (record.get("gradient") or {}).get("tokens")
        self.in_a_row = self.in_a_row + 1 if share == 0 else 0
        if self.in_a_row < self.threshold:
            return ""
        return (
            f"nothing was trained in the last {self.in_a_row} steps, since the rewards of every group were equal; read "
            "`april samples`, give easier or harder prompts, or a reward that tells responses apart"
        )


# --- the engines' weights ---------------------------------------------------------------------------------------------


class WrongWeightsAlarm(Alarm):
    """Raised by engines that fail the weight check."""

    page = "docs/learner.md#proof-of-weights"
    threshold = 1
    """Number of failed weight checks since the last step at which the alarm is raised; an engine counts once per
    attempt."""

    def look(self, record: dict[str, Any]) -> str:
        wrong = (record.get("learner") or {}).get("publish_wrong") or 0
        if wrong < self.threshold:
            return ""
        return (
            f"{wrong:g} times since the last step an engine did not hold the weights that it was sent, and got no "
            "work; read in the learner's log which and why, and mend the way of the weights into it"
        )


GAP_PREFIX = "engine_gap_"
GAP_FIGURES = ("tokens", "mean", "largest", "age")
"""Figures about each worker's log-probability gap, in learner metrics named GAP_PREFIX + FIGURE + _ + WORKER."""

Figures = dict[str, float]


def split_gaps(learner: Figures, step: int) -> tuple[dict[str, Figures], Figures]:
    """Split the learner's metrics of batch `step` into the gap figures of each worker, with the policy step they refer
    to, and the other metrics."""
    gaps: dict[str, Figures] = {}
    for name in learner:
        if name.startswith(GAP_PREFIX):
            figure, _, worker = name.removeprefix(GAP_PREFIX).partition("_")
            gaps.setdefault(worker, {})[figure] = learner[name]
    rest = {name: value for name, value in learner.items() if not name.startswith(GAP_PREFIX)}
    return {worker: describe_gap(gap, step) for worker, gap in gaps.items() if set(gap) == set(GAP_FIGURES)}, rest


def describe_gap(gap: Figures, step: int) -> Figures:
    tokens, age = int(gap["tokens"]), int(gap["age"])
    return {"step": step - age, "age": age, "tokens": tokens, "mean": gap["mean"], "largest": gap["largest"]}


class EngineGapAlarm(Alarm):
    """Raised by engines whose log-probabilities differ too much from the learner's, so that they may not sample from
    the weights they report."""

    page = "docs/learner.md#learner-and-engine-on-what-is-trained"
    threshold = 4.0
    """Largest allowed mean gap, as a multiple of the largest mean gap of any worker in the run's first batch."""
    least, most = 1e-4, 0.6
    """Bounds of the allowed gap in nats: the tolerances of the weight check for float32 and for 8-bit weights."""
    least_tokens = 100
    """Fewest tokens for which a worker's mean gap is judged."""

    def __init__(self) -> None:
        self.limit: float | None = None

    def look(self, record: dict[str, Any]) -> str:
        gaps = {
            worker: gap
            for worker, gap in (record.get("engine_gaps") or {}).items()
            if gap["age"] == 0 and gap["tokens"] >= self.least_tokens and gap["mean"] is not None
        }
        if not gaps:
            return ""
        furthest = max(gaps, key=lambda worker: gaps[worker]["mean"])
        mean, largest = gaps[furthest]["mean"], gaps[furthest]["largest"]
        if self.limit is None:
            self.limit = min(self.most, max(self.least, self.threshold * mean))
        if mean <= self.limit:
            return ""
        beyond = sum(gap["mean"] > self.limit for gap in gaps.values())
        return (
            f"what {furthest} sampled under the newest weights the learner sees with other probabilities than it said "
            f"({mean:.2g} apart in the mean, {largest:.2g} at most; up to {self.limit:.2g} are rounding; {beyond} of "
            f"{len(gaps)} workers): look whether its engine takes every update, and computes as the learner does"
        )
