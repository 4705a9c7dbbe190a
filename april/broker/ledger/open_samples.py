"""Counts of the samples of open groups by state, kept up to date at each change of state.

Each fork of an agent's session counts as a sample; `Group.pending_samples` counts sessions.
"""

from collections import Counter

from april.broker.ledger.samples import ENDED, Group, Sample, SampleState


class OpenSamples:
    """Counters of training and of evaluation samples."""

    def __init__(self) -> None:
        self._counts: dict[bool, Counter[SampleState]] = {False: Counter(), True: Counter()}

    def add(self, group: Group) -> None:
        """Count the samples of a group that has been opened."""
        self._add_times(group, 1)
        group.pending_samples = [sample.state in ENDED for sample in group.samples].count(False)

    def remove(self, group: Group) -> None:
        """Stop counting the samples of a group that is no longer open."""
        self._add_times(group, -1)

    def _add_times(self, group: Group, times: int) -> None:
        counts = self._counts[group.evaluation]
        for sample in group.samples:
            counts[sample.state] += times
            for fork in sample.forks:
                counts[fork.state] += times

    def add_fork(self, fork: Sample) -> None:
        self._counts[fork.group.evaluation][fork.state] += 1

    def remove_fork(self, fork: Sample) -> None:
        self._counts[fork.group.evaluation][fork.state] -= 1

    def set_state(self, sample: Sample, state: SampleState) -> None:
        """Change the state of a sample whose group is open."""
        counts = self._counts[sample.group.evaluation]
        counts[sample.state] -= 1
        counts[state] += 1
        sample.state = state
        if state in ENDED and sample.main_sample is None:
            sample.group.pending_samples -= 1

    def by_state(self, evaluation: bool = False) -> dict[str, int]:
        """Samples by name of state; states without samples are left out."""
        return {str(state): count for state, count in self._counts[evaluation].items() if count}

    def count(self, state: SampleState, evaluation: bool = False) -> int:
        return self._counts[evaluation][state]
