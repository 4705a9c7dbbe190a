"""The current leases by id and by holder, and counts of open samples by state."""

from array import array
from bisect import bisect_left, insort
from collections import Counter

from april.broker.ledger.samples import ENDED, Group, Lease, Sample, SampleState, as_agent_sample
from april.wire.work import session_lease_id


class LeaseBook(dict[int, Lease]):
    """The current leases by id, with indexes by holder; `hold` and `release` alone change them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, array[int]] = {}
        """Lease ids of each holder, ascending."""
        self.load: Counter[tuple[str, bool]] = Counter()
        """Number of leases under which samples are being generated, by (worker uid, whether they are for
        evaluation)."""
        self.generating = 0
        """Number of leases under which training samples are generated."""
        self.evaluating_agents = 0
        """Number of leases on sessions of evaluation samples."""
        self.revoked: list[tuple[str, int]] = []
        """(holder, lease id) of each lease that the ledger itself has ended; the service tells the holders and clears
        the list."""

    def hold(self, lease: Lease) -> None:
        """Add a lease to the current leases."""
        lease.floor = max(lease.step, lease.sample.first_step)
        self[lease.id] = lease
        insort(self.held.setdefault(lease.worker, array("Q")), lease.id)
        self.evaluating_agents += lease.agent and lease.sample.group.evaluation
        if lease.generating:
            self.load[lease.worker, lease.sample.group.evaluation] += 1
            self.generating += not lease.sample.group.evaluation

    def release(self, lease_id: int) -> Lease:
        """Remove a lease from the current leases, and return it."""
        lease = self.pop(lease_id)
        self.end_generation(lease)
        held = self.held[lease.worker]
        del held[bisect_left(held, lease_id)]
        if not held:
            del self.held[lease.worker]
        self.evaluating_agents -= lease.agent and lease.sample.group.evaluation
        if lease.agent:
            as_agent_sample(lease.sample).agent_lease = 0
        else:
            for sample in lease.samples:
                sample.lease_id = 0
        return lease

    def find(self, lease_id: int) -> Lease | None:
        """The current lease with this id, or with the id of a fork of its session; None if there is none."""
        lease = self.get(lease_id)
        if lease is None:
            lease = self.get(session_lease_id(lease_id))
            return lease if lease and lease.agent else None
        return lease

    def revoke(self, sample: Sample) -> None:
        """End the leases of a sample and its forks, and list them in `revoked`, so that their holders are told."""
        for fork in sample.with_forks:
            for lease_id in filter(None, (fork.lease_id, fork.agent_lease)):
                self.revoked.append((self.release(lease_id).worker, lease_id))

    def end_generation(self, lease: Lease) -> None:
        """Take a lease out of the counts of generating leases (`load`, `generating`); call it before the sample's state
        changes."""
        if lease.generating:
            evaluation = lease.sample.group.evaluation
            self.generating -= not evaluation
            self.load[lease.worker, evaluation] -= 1
            if not self.load[lease.worker, evaluation]:
                del self.load[lease.worker, evaluation]


class OpenSamples:
    """Number of samples of open groups by state, counted apart for training and evaluation, and updated at each
    change."""

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
        """Number of training samples or, with `evaluation`, of evaluation samples by name of state; states without
        samples are left out."""
        return {str(state): count for state, count in self._counts[evaluation].items() if count}

    def count(self, state: SampleState, evaluation: bool = False) -> int:
        return self._counts[evaluation][state]
