"""The alarm about batches in which a few stale tokens, or corrections for staleness, leave little weight to the
others."""

from typing import Any, ClassVar

from april.broker.alarms.alarm import Alarm, figures, shipped


@shipped("effective_samples")
class EffectiveSamplesAlarm(Alarm):
    """Raised when a few stale tokens outweigh the others: the effective sample size is below 50 % of the tokens,
    computed from probability ratios (`ess`), or below 25 %, from the weights that corrections applied
    (`weight_ess`)."""

    page = "docs/algorithms.md#figures-of-a-step"
    steps_in_a_row = 3
    usual: ClassVar = {"ess": 0.5, "weight_ess": 0.25}
    """Effective sample size, as a share of the trained tokens, below which the alarm is raised, by name of the metric.
    `ess`: computed from the ratios of the trained policy's probabilities to the sampling versions'; `weight_ess`: from
    the importance weights that corrections applied."""

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
