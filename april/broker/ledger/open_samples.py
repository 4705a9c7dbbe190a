"""How many samples of open groups are in which state, counted where states change: nobody has to look at each.

Each branch of an agent's session is one here; what is left of a group is counted in sessions.
"""

from collections import Counter

from april.broker.ledger.samples import ENDED, Group, Sample, SampleState


class OpenSamples:
    """Those of training and of evaluation apart."""

    def __init__(self) -> None:
        self._counts: dict[bool, Counter[SampleState]] = {False: Counter(), True: Counter()}

    def add(self, group: Group) -> None:
        """It is open now."""
        self._enter(group, 1)
        group.left = [sample.state in ENDED for sample in group.samples].count(False)

    def remove(self, group: Group) -> None:
        """It is open no more."""
        self._enter(group, -1)

    def _enter(self, group: Group, times: int) -> None:
        counts = self._counts[group.evaluation]
        for sample in group.samples:
            counts[sample.state] += times
            for branch in sample.branches:
                counts[branch.state] += times

    def begin(self, branch: Sample) -> None:
        """A session has one branch more."""
        self._counts[branch.group.evaluation][branch.state] += 1

    def forget(self, branch: Sample) -> None:
        """A session has one branch less."""
        self._counts[branch.group.evaluation][branch.state] -= 1

    def turn(self, sample: Sample, state: SampleState) -> None:
        """Bring it into another state; its group is open."""
        counts = self._counts[sample.group.evaluation]
        counts[sample.state] -= 1
        counts[state] += 1
        sample.state = state
        if state in ENDED and sample.trunk is None:
            sample.group.left -= 1

    def by_state(self, evaluation: bool = False) -> dict[str, int]:
        """States that no sample is in are left out."""
        return {str(state): count for state, count in self._counts[evaluation].items() if count}

    def count(self, state: SampleState, evaluation: bool = False) -> int:
        return self._counts[evaluation][state]
