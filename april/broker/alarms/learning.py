"""Alarms about learning: what is trained, how much each token counts in it, and how the policy changes."""

from typing import Any, ClassVar

from april.broker.alarms.alarm import Alarm, figures, shipped


@shipped("nothing_trained")
class NothingTrainedAlarm(Alarm):
    """Raised when no group had a spread of rewards, so that nothing had a gradient."""

    page = "docs/start/troubleshooting.md#it-learns-badly"
    steps_in_a_row = 3

    def look(self, record: dict[str, Any]) -> str:
        if figures(record, "gradient").get("tokens") != 0:
            return ""
        return (
            f"nothing was trained in the last {self.steps_in_a_row} steps, since the rewards of every group were "
            "equal; read `april samples`, give easier or harder prompts, or a reward that tells responses apart"
        )


@shipped("policy_gap")
class PolicyGapAlarm(Alarm):
    """Raised when the policy is more than 0.05 nats (`k3`) from the versions that sampled its training tokens."""

    steps_in_a_row = 3
    threshold = 0.05
    """Largest k3 estimate, in nats, of the KL divergence between the trained policy and the versions that sampled its
    tokens."""

    def look(self, record: dict[str, Any]) -> str:
        gap = figures(record, "learner").get("k3") or 0.0
        if gap <= self.threshold:
            return ""
        return (
            f"the policy is {gap:.2g} nats from the one that sampled what it trains (up to {self.threshold:g} is usual)"
            ": lower schedule.max_staleness or learner.lr, or correct more by algorithm.corrections"
        )


@shipped("effective_samples")
class EffectiveSamplesAlarm(Alarm):
    """Raised when a few stale tokens outweigh the others: the effective sample size is below 50 % of the tokens,
    computed from probability ratios (`ess`), or below 25 %, from the weights that corrections applied
    (`weight_ess`)."""

    page = "docs/algorithms.md#figures-of-a-step"
    steps_in_a_row = 3
    usual: ClassVar = {"ess": 0.5, "weight_ess": 0.25}
    """Least usual effective sample size as a share of the trained tokens, by metric. `ess`: of the ratios of the
    trained policy to the sampling versions; `weight_ess`: of the importance weights that corrections applied."""

    def look(self, record: dict[str, Any]) -> str:
        learner = figures(record, "learner")
        few = [name for name, least in self.usual.items() if learner.get(name) is not None and learner[name] < least]
        if not few:
            return ""
        share, least = learner[few[0]], self.usual[few[0]]
        return (
            f"a few tokens outweigh the others: they count as {share:.0%} of what is trained ({few[0]}, {least:.0%} "
            "and more are usual): lower schedule.max_staleness or learner.lr, or weigh stale tokens otherwise by "
            "algorithm.corrections"
        )


@shipped("length_bias")
class LengthBiasAlarm(Alarm):
    """Raised when lately trained responses have other lengths than created ones: the distance of the two distributions
    is above 1.5 times what chance explains."""

    page = "docs/operations.md#the-alarm-on-lengths"
    steps_in_a_row = 3
    threshold = 1.5
    """Distance between trained and created response lengths above which the alarm is raised, as a multiple of the
    largest distance that chance explains."""

    def look(self, record: dict[str, Any]) -> str:
        drift = figures(record, "lengths").get("drift")
        if not drift or drift["distance"] <= self.threshold * drift["band"]:
            return ""
        return (
            f"what is trained has other lengths than what is created (distance {drift['distance']:.2f}, by chance up "
            f"to {drift['band']:.2f}): look for what discards by length, a filter, a time limit of a verifier, or "
            "workers that die on long responses"
        )


@shipped("looping")
class LoopingAlarm(Alarm):
    """Raised when more than 20 % of the responses end in a loop: at least 48 tokens, one stretch repeated four times or
    more (`looping_share`)."""

    steps_in_a_row = 3
    threshold = 0.2
    """Share of a batch's responses that end in a loop of repeated tokens, above which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        share = figures(record, "learner").get("looping_share") or 0.0
        if share <= self.threshold:
            return ""
        return (
            f"{share:.0%} of the responses end in a loop, the same tokens again and again: read "
            "`april samples --worst 5`; a higher sampling.temperature, a lower learner.lr, or a reward against loops"
        )


@shipped("entropy_collapse")
class EntropyCollapseAlarm(Alarm):
    """Raised when the entropy is below a tenth of that of the first three steps, and the reward is at most 0.02 better
    than theirs."""

    steps_in_a_row = 3
    threshold = 0.1
    """Entropy below which the alarm is raised, as a fraction of the mean entropy of the first steps."""
    first = 3
    """Number of first steps with which later steps are compared."""
    gain = 0.02
    """Gain in mean reward since the first steps above which the alarm is not raised: a better policy may be more
    certain."""

    def __init__(self) -> None:
        self.entropies: list[float] = []
        self.rewards: list[float] = []

    def look(self, record: dict[str, Any]) -> str:
        entropy, reward = figures(record, "learner").get("entropy"), record.get("reward", 0.0)
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
