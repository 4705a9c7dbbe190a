"""How much waits and works, and for how long: counted bit by bit, so that the broker's loop is never held up."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import ENDED, Group, GroupState

SLICE = 1000
"""most groups and samples that are looked at in one pass of the broker's loop: well under a millisecond"""
PAUSE_S = 2.0
"""between the end of one such look and the next"""


@dataclass(frozen=True)
class Queues:
    """One look at all open groups; when much is open, it takes several passes of the loop, in which things move on."""

    training: dict[str, int] = field(default_factory=dict)
    """samples by state"""
    evaluation: dict[str, int] = field(default_factory=dict)
    training_age_s: dict[str, float] = field(default_factory=dict)
    """by state, since the group of its oldest sample was opened, or since the broker started"""
    evaluation_age_s: dict[str, float] = field(default_factory=dict)
    oldest_waiting_s: float = 0.0
    """since the group of the oldest sample that waits for a lease was opened, or since the broker started"""
    oldest_waiting_steps: int = 0
    """the next batch minus the policy step at which its group was first leased"""
    oldest_ready_steps: int = 0
    """the same of the complete groups"""
    longest_lease_s: float = 0.0


class Census:
    """`latest` is the last complete look at them; `advance` goes on with the next by one slice."""

    def __init__(self, ledger: Ledger, max_run_s: float):
        self.ledger = ledger
        self.max_run_s = max_run_s
        self.latest = Queues()
        self._next_pass = 0.0
        self._groups: Iterator[Group] | None = None
        self._first_seen: dict[int, float] = {}
        self._waiting_steps = self._ready_steps = 0

    def advance(self, now: float) -> None:
        if self._groups is None:
            if now < self._next_pass:
                return
            self._groups = self._begin()
        looked_at = 0
        for group in self._groups:
            looked_at += 1
            if group.state is GroupState.OPEN:
                self._count(group, now)
                looked_at += len(group.samples)
            elif group.state is GroupState.READY:
                self._ready_steps = max(self._ready_steps, self.ledger.next_step - group.opened_at)
            if looked_at >= SLICE:
                return
        self._finish(now)

    def _begin(self) -> Iterator[Group]:
        self._seen: dict[int, float] = {}
        self._since: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._waiting_since = self._leased_since = float("inf")
        self._first_lease = 1 << 64
        self._waiting_steps = self._ready_steps = 0
        return iter(list(self.ledger.groups.values()))

    def _count(self, group: Group, now: float) -> None:
        since = self._seen[group.id] = self._first_seen.get(group.id, now)
        oldest, first_lease = self._since[group.evaluation], self._first_lease
        for sample in group.samples:
            state, lease_id = sample.state, sample.lease_id
            if state not in oldest:  # those that come later were not opened earlier
                oldest[state] = since
            if lease_id:
                # they are numbered as they are granted
                if lease_id < first_lease and (lease := self.ledger.leases.get(lease_id)):
                    first_lease = self._first_lease = lease_id
                    self._leased_since = min(self._leased_since, lease.ends_at - self.max_run_s)
            elif state not in ENDED and not sample.agent_lease:
                self._waiting_since = min(self._waiting_since, since)
                self._waiting_steps = max(self._waiting_steps, self.ledger.next_step - group.opened_at)

    def _finish(self, now: float) -> None:
        self.latest = Queues(
            training=self.ledger.open_samples.by_state(),
            evaluation=self.ledger.open_samples.by_state(evaluation=True),
            training_age_s=ages(self._since[False], now),
            evaluation_age_s=ages(self._since[True], now),
            oldest_waiting_s=max(0.0, now - self._waiting_since),
            oldest_waiting_steps=self._waiting_steps,
            oldest_ready_steps=self._ready_steps,
            longest_lease_s=max(0.0, now - self._leased_since),
        )
        self._groups, self._first_seen = None, self._seen
        self._next_pass = now + PAUSE_S


def ages(since: dict[str, float], now: float) -> dict[str, float]:
    return {str(state): round(max(0.0, now - instant), 1) for state, instant in since.items()}
