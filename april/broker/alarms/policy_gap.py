"""The alarm about the policy's distance from the versions that sampled what it trains."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped


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
