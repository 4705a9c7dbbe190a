"""Who holds which sample: the leases that are current, by id and by holder."""

from array import array
from bisect import bisect_left, insort
from collections import Counter

from april.broker.ledger.samples import Lease, Sample, of_agent
from april.wire.agents import session_of


class LeaseBook:
    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.held: dict[str, array[int]] = {}
        """ids of leases by holder, in order"""
        self.load: Counter[tuple[str, bool]] = Counter()
        """leases that generate, by (worker, evaluation)"""
        self.generating = 0
        """training samples that some worker generates now"""
        self.voided: list[tuple[str, int]] = []
        """(holder, id) of leases that ended with their group, until somebody tells the workers"""

    def hold(self, lease: Lease) -> None:
        """Enter a lease in the books."""
        lease.floor = max(lease.step, lease.sample.first_step)
        self.leases[lease.id] = lease
        insort(self.held.setdefault(lease.worker, array("Q")), lease.id)
        if lease.generating:
            self.load[lease.worker, lease.sample.group.evaluation] += 1
            self.generating += not lease.sample.group.evaluation

    def release(self, lease_id: int) -> Lease:
        """Take a lease out of the books."""
        lease = self.leases.pop(lease_id)
        self.stops_generating(lease)
        held = self.held[lease.worker]
        del held[bisect_left(held, lease_id)]
        if not held:
            del self.held[lease.worker]
        if lease.agent:
            of_agent(lease.sample).agent_lease = 0
        else:
            for sample in lease.samples:
                sample.lease_id = 0
        return lease

    def lease_of(self, lease_id: int) -> Lease | None:
        """The current lease that an id belongs to: its own, or that of a branch of its session."""
        lease = self.leases.get(lease_id)
        if lease is None:
            lease = self.leases.get(session_of(lease_id))
            return lease if lease and lease.agent else None
        return lease

    def void(self, sample: Sample) -> None:
        """End its leases, and those of its branches, of which their holders have to be told."""
        for line in sample.lines:
            for lease_id in filter(None, (line.lease_id, line.agent_lease)):
                self.voided.append((self.release(lease_id).worker, lease_id))

    def stops_generating(self, lease: Lease) -> None:
        if lease.generating:
            evaluation = lease.sample.group.evaluation
            self.generating -= not evaluation
            self.load[lease.worker, evaluation] -= 1
            if not self.load[lease.worker, evaluation]:
                del self.load[lease.worker, evaluation]
