"""The lengths of responses by cohorts of creation, so that training can be compared with what generation makes."""

from collections import Counter, deque

Lengths = Counter[int]
"""how many responses have each length (tokens)"""

RECENT_BATCHES = 20
"""of trained groups, and of created groups in settled cohorts, that are kept for comparison"""


class LengthCohorts:
    """Groups in cohorts by creation. A cohort is settled when each of its groups is trained or discarded, so
    that short responses, which finish first, are never compared with long ones that are still on the way."""

    def __init__(self, cohort_groups: int):
        self.cohort_groups = cohort_groups
        self.recent_groups = RECENT_BATCHES * cohort_groups
        """that are kept for comparison, of each kind"""
        self.settled = 0
        self.created: Lengths = Counter()
        self.trained: Lengths = Counter()
        self.waiting: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        """by cohort and ordinal: (created, trained) of the groups that have ended in cohorts that are not settled"""
        self.lately_trained: deque[list[int]] = deque(maxlen=self.recent_groups)
        self.lately_created: deque[list[int]] = deque(maxlen=self.recent_groups)
        """lengths of the newest groups that were trained, and of those in settled cohorts, since the broker started"""

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """The `ordinal`-th group created has come to its end; lengths of all its responses and of those trained
        (tokens). Doing so again, as a learner does that restarts, changes nothing."""
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
