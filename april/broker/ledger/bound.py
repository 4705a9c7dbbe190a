"""The staleness bound: which groups may be opened and which batches delivered so that no trained token is too old."""

from collections import Counter
from collections.abc import Mapping


class StalenessBound:
    """Counts the undelivered groups by deadline.

    Let v0(g) be the step of the worker's version at the first lease of group g, S the largest staleness,
    d(g) = v0(g) + S the last batch that may train g, k the next batch and N its groups. The invariant is

        for every D >= k - 1:  #{undelivered g : d(g) <= D}  <=  (D - k + 1) * N

    At D = k - 1 it says that no group is overdue. A group is opened only if the invariant survives, and a
    batch is delivered only if it holds for k + 1 afterwards. No token of g is older than v0(g), so a token
    trained in batch k has a staleness of at most k - v0(g) <= S: the bound is a theorem, whatever the speeds,
    lengths and failures. It also keeps work from having to be thrown away: batches k .. D have room for every
    group that is due by D. And it lets work go on: the N oldest undelivered groups can always be delivered once
    they are complete, and a worker at step k can always open groups as long as fewer than N are undelivered.

        bound = StalenessBound(max_staleness=5, batch_groups=32)
        if bound.survives(next_step=k, opened_at=k):
            bound.add(k)
    """

    def __init__(self, max_staleness: int, batch_groups: int):
        self.max_staleness = max_staleness
        self.batch_groups = batch_groups
        self._due: Counter[int] = Counter()

    def deadline(self, opened_at: int) -> int:
        """Last batch that may train a group first leased at step `opened_at`."""
        return opened_at + self.max_staleness

    def add(self, opened_at: int) -> None:
        self._due[self.deadline(opened_at)] += 1

    def remove(self, opened_at: int) -> None:
        deadline = self.deadline(opened_at)
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]

    def holds(self, next_step: int) -> bool:
        """Whether the invariant holds with k = `next_step` for the groups counted now."""
        return self._holds(self._due, next_step)

    def survives(self, next_step: int, opened_at: int) -> bool:
        """Whether the invariant would hold with one more group first leased at step `opened_at`."""
        deadline = self.deadline(opened_at)
        return self._holds({**self._due, deadline: self._due[deadline] + 1}, next_step)

    def survives_delivery(self, next_step: int, delivered: Mapping[int, int]) -> bool:
        """Whether the invariant would hold for the batch after `next_step`.

        `delivered`: number of groups in batch `next_step` by the step they were opened at.
        """
        due = Counter(self._due)
        due.subtract({self.deadline(opened_at): count for opened_at, count in delivered.items()})
        return self._holds(due, next_step + 1)

    def _holds(self, due: Mapping[int, int], next_step: int) -> bool:
        total = 0
        for deadline in sorted(due):
            total += due[deadline]
            if total > max(0, deadline - next_step + 1) * self.batch_groups:
                return False
        return True
