"""The alarm about slots that are free while the learner waits."""

from typing import Any

from april.broker.alarms.alarm import Alarm, figures, shipped

FEWEST_LOOKS = 4
"""Number of measurements of the slots' occupancy in a step from which on their mean is used."""


def slots_while_waiting(record: dict[str, Any]) -> tuple[dict[str, float], float]:
    """(slots, share): the share of its time that the learner waited for a batch in a step, and the occupancy of the
    workers' slots in it, as `SlotMeans.means` gives it. The occupancy is empty if the share is not above a half, there
    are no slots, or the step was too short for a mean."""
    slots, learner = figures(record, "slots"), figures(record, "learner")
    waited_s, trained_s = learner.get("wait_s") or 0.0, learner.get("train_s") or 0.0
    share = waited_s / (waited_s + trained_s) if waited_s + trained_s else 0.0
    measured = slots.get("slots") and slots.get("looks", 0) >= FEWEST_LOOKS
    return slots if measured and share > 0.5 else {}, share


@shipped("starved_engines")
class StarvedEnginesAlarm(Alarm):
    """Raised when less than 20 % of the slots were busy, while the learner waited for more than half of its time; steps
    of less than a second are not judged."""

    steps_in_a_row = 3
    threshold = 0.2
    """Share of busy slots below which the alarm is raised."""

    def look(self, record: dict[str, Any]) -> str:
        slots, waited = slots_while_waiting(record)
        if not slots or slots["busy"] >= self.threshold:
            return ""
        return (
            f"only {slots['busy']:.0%} of {slots['slots']:.0f} slots were busy while the learner waited "
            f"{waited:.0%} of the time: start more at once (schedule.over_sampling_batch_size, or a schedule.kind "
            "that goes on while the learner trains), or give fewer slots"
        )
