"""Response lengths by cohort of creation, to compare the lengths that are trained with those that are generated."""

from collections import Counter, deque

Lengths = Counter[int]
"""Number of responses by length in tokens."""

RECENT_BATCHES = 20
"""Batches' worth of groups kept for the recent comparison, of trained and of created groups each."""


class LengthCohorts:
    """Cohorts of groups by creation. A cohort is settled once each of its groups is trained or discarded, so that short
    responses, which finish first, are never compared with longer ones still being generated."""

    def __init__(self, cohort_groups: int):
        self.cohort_groups = cohort_groups
        self.recent_groups = RECENT_BATCHES * cohort_groups
        """Capacity of `lately_trained` and `lately_created`."""
        self.settled = 0
        """Cohorts settled so far; they settle in order."""
        self.created: Lengths = Counter()
        self.trained: Lengths = Counter()
        self.waiting: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        """(created, trained) lengths of ended groups in unsettled cohorts, by cohort and ordinal."""
        self.lately_trained: deque[list[int]] = deque(maxlen=self.recent_groups)
        self.lately_created: deque[list[int]] = deque(maxlen=self.recent_groups)
        """Response lengths of the newest trained groups, and of the newest groups in settled cohorts, since the broker
        started."""

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """Record the end of group number `ordinal`: lengths of all its responses and of the trained ones, in tokens.

        Idempotent: a restarted learner trains groups again.
        """
        cohort = ordinal // self.cohort_groups
        if cohort < self.settled:
            return
        ended = self.waiting.setdefault(cohort, {})
        if trained and ordinal not in ended:
            self.lately_trained.append(trained)
        ended[ordinal] = (created, trained)
        while len(self.waiting.get(self.settled, ())) == self.cohort_groups:
            for group_created, group_trained in self.waiting.pop(self.settled).values():
                self.created.update(group_created)
                self.lately_created.append(group_created)
                self.trained.update(group_trained)
            self.settled += 1
