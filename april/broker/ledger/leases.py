"""The current leases, by id and by holder."""

from array import array
from bisect import bisect_left, insort
from collections import Counter

from april.broker.ledger.samples import Lease, Sample, as_agent_sample
from april.wire.agents import session_lease_id


class LeaseBook:
    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.held: dict[str, array[int]] = {}
        """Lease ids of each holder, ascending."""
        self.load: Counter[tuple[str, bool]] = Counter()
        """Generating leases by (worker, whether for evaluation)."""
        self.generating = 0
        """Generating leases of training samples."""
        self.revoked: list[tuple[str, int]] = []
        """(holder, lease id) of leases that the ledger ended itself; the service tells the holders and clears it."""

    def hold(self, lease: Lease) -> None:
        """Add a lease."""
        lease.floor = max(lease.step, lease.sample.first_step)
        self.leases[lease.id] = lease
        insort(self.held.setdefault(lease.worker, array("Q")), lease.id)
        if lease.generating:
            self.load[lease.worker, lease.sample.group.evaluation] += 1
            self.generating += not lease.sample.group.evaluation

    def release(self, lease_id: int) -> Lease:
        """Remove a lease."""
        lease = self.leases.pop(lease_id)
        self.end_generation(lease)
        held = self.held[lease.worker]
        del held[bisect_left(held, lease_id)]
        if not held:
            del self.held[lease.worker]
        if lease.agent:
            as_agent_sample(lease.sample).agent_lease = 0
        else:
            for sample in lease.samples:
                sample.lease_id = 0
        return lease

    def lease_of(self, lease_id: int) -> Lease | None:
        """The current lease that owns an id, its own or that of a fork of its session; None if there is none."""
        lease = self.leases.get(lease_id)
        if lease is None:
            lease = self.leases.get(session_lease_id(lease_id))
            return lease if lease and lease.agent else None
        return lease

    def revoke(self, sample: Sample) -> None:
        """End the leases of a sample and its forks, and remember to tell their holders."""
        for fork in sample.with_forks:
            for lease_id in filter(None, (fork.lease_id, fork.agent_lease)):
                self.revoked.append((self.release(lease_id).worker, lease_id))

    def end_generation(self, lease: Lease) -> None:
        """Remove a lease from the generation counters; call it before the sample's state changes."""
        if lease.generating:
            evaluation = lease.sample.group.evaluation
            self.generating -= not evaluation
            self.load[lease.worker, evaluation] -= 1
            if not self.load[lease.worker, evaluation]:
                del self.load[lease.worker, evaluation]
