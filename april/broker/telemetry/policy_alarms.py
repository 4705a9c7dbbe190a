"""Alarms about the policy's responses, and about their weight in training."""

from typing import Any, ClassVar

from april.broker.telemetry.in_a_row import ConsecutiveAlarm


class PolicyGapAlarm(ConsecutiveAlarm):
    page = "docs/watching.md#alarms"
    threshold = 0.05
    """Largest k3 estimate, in nats, of the KL divergence between the trained policy and the versions that sampled."""

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
    """Least usual effective sample size, as a share of the trained tokens, by metric: `ess` of the ratios of the
    trained policy to the sampling versions, `weight_ess` of the weights that corrections have applied."""

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
    """Distance as a multiple of the band that chance explains."""

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
    """Share of a batch's responses that end in a loop."""

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
    """Least entropy, as a fraction of that of the first steps."""
    first = 3
    """First steps, which later ones are compared with."""
    gain = 0.02
    """Gain in mean reward since the first steps above which there is no alarm: a better policy may be more certain."""

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
