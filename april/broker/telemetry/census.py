"""Counts and ages of open groups and samples, scanned in slices so that the broker's loop is never blocked, and the
occupancy of the engines' slots."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import ENDED, Group, GroupState

SLICE = 1000
"""Most groups and samples scanned in one pass of the broker's loop; a slice takes well under a millisecond."""
PAUSE_S = 2.0
"""Seconds between the end of one scan and the start of the next."""


@dataclass(frozen=True)
class QueueSnapshot:
    """Counts and ages from one scan of all open groups. A long scan takes several passes of the loop, so states may
    change meanwhile."""

    training: dict[str, int] = field(default_factory=dict)
    """Number of training samples by state."""
    evaluation: dict[str, int] = field(default_factory=dict)
    """Number of evaluation samples by state."""
    training_age_s: dict[str, float] = field(default_factory=dict)
    """Age of the oldest training group with a sample in a state, by state: seconds since it was opened or, if later,
    the broker started."""
    evaluation_age_s: dict[str, float] = field(default_factory=dict)
    """Age of the oldest evaluation group with a sample in a state, by state: seconds since it was opened or, if later,
    the broker started."""
    oldest_waiting_s: float = 0.0
    """Age of the oldest group with a sample that waits for a lease: seconds since it was opened or, if later, the
    broker started."""
    oldest_waiting_steps: int = 0
    """Age in policy steps of the oldest group with a sample that waits for a lease: step of the next batch minus the
    step at which the group was first leased."""
    oldest_ready_steps: int = 0
    """Age in policy steps of the oldest complete group that waits for a batch: step of the next batch minus the step at
    which the group was first leased."""
    longest_lease_s: float = 0.0
    """Age of the oldest lease in seconds, counted from the start of the broker at the earliest."""


class QueueScanner:
    """Scans the ledger's groups: `advance` scans one slice, `latest` is the result of the last complete scan."""

    def __init__(self, ledger: Ledger, max_run_s: float):
        self.ledger = ledger
        self.max_run_s = max_run_s
        self.latest = QueueSnapshot()
        self._next_scan = 0.0
        self._groups: Iterator[Group] | None = None
        self._first_seen: dict[int, float] = {}
        self._waiting_steps = self._ready_steps = 0

    def advance(self, now: float) -> None:
        """Scan the next slice of groups, or begin a new scan, `PAUSE_S` after the end of the last."""
        if self._groups is None:
            if now < self._next_scan:
                return
            self._groups = self._begin()
        scanned = 0
        for group in self._groups:
            scanned += 1
            if group.state is GroupState.OPEN:
                self._count(group, now)
                scanned += len(group.samples)
            elif group.state is GroupState.READY:
                self._ready_steps = max(self._ready_steps, self.ledger.steps.next - group.opened_at)
            if scanned >= SLICE:
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
            if state not in oldest:  # groups come in the order in which they were opened
                oldest[state] = since
            if lease_id:
                # lease ids grow in the order of the grants
                if lease_id < first_lease and (lease := self.ledger.leases.get(lease_id)):
                    first_lease = self._first_lease = lease_id
                    self._leased_since = min(self._leased_since, lease.ends_at - self.max_run_s)
            elif state not in ENDED and not sample.agent_lease:
                self._waiting_since = min(self._waiting_since, since)
                self._waiting_steps = max(self._waiting_steps, self.ledger.steps.next - group.opened_at)

    def _finish(self, now: float) -> None:
        self.latest = QueueSnapshot(
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
        self._next_scan = now + PAUSE_S


def ages(since: dict[str, float], now: float) -> dict[str, float]:
    return {str(state): round(max(0.0, now - instant), 1) for state, instant in since.items()}


class SlotMeans:
    """Mean occupancy of the engines' slots over a step, from measurements at equal intervals of time."""

    def __init__(self) -> None:
        self.looks = self.busy = self.slots = self.waiting = 0

    def add(self, busy: int, slots: int, waiting: int) -> None:
        self.looks += 1
        self.busy += min(busy, slots)
        self.slots += slots
        self.waiting += waiting

    def means(self) -> dict[str, float]:
        """Means of the measurements so far: `busy`, share of the slots in use; `slots`, number of slots; `waiting`,
        number of samples that wait for a slot. `looks`: number of measurements."""
        looks = max(1, self.looks)
        busy = self.busy / self.slots if self.slots else 0.0
        return {
            "busy": round(busy, 4),
            "slots": round(self.slots / looks, 2),
            "waiting": round(self.waiting / looks, 1),
            "looks": self.looks,
        }
