"""The alarm about the policy's entropy."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


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
