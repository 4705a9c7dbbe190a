"""Migration of stragglers to faster workers: a pure rule over the ledger and the decode speeds seen so far.

It is applied while a worker has room and no waiting sample could use that room. Time is an argument.

    migration = Migration()
    migration.observe_speed("w0", running=12, token_s=0.03)     # whenever a worker's decode speed is known
    for move in migration.choose(ledger, loads, now):
        ...                                                     # recall the lease; its tokens come back first
    for move in migration.take_returned(ledger, now):
        migration.confirm(lease, now)                           # leased to move.target
    migration.observe_arrival(lease, tokens=7, running=3, now)  # its first tokens there: measures the cost of the move
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState, Lease, Sample, SampleState

CHOICE_INTERVAL_S = 0.5
"""Least interval between two choices of samples to move, seconds."""
REMAINING_SHARE = 0.5
"""Expected number of tokens that a response still gets, as a share of its present length: with heavy-tailed lengths, a
long response is far from its end. A larger share would move samples that end before their move has paid off."""
MARGIN = 0.05
"""Least time that a move must save, as a share of the time that the sample would still take without it; about the error
of the speed estimates."""
DECAY = 0.95
"""Factor by which the weight of all older observations shrinks with each new one: contexts grow, so old observations
underestimate the time per token."""
PRIOR_PREFILL = 1 / 32
"""Assumed ratio of the time to prefill a token to the time to decode one, until a move has measured it."""
PATIENCE_S = 10.0
"""Seconds after which a requested move is dropped if the worker has not handed the sample back."""
LengthOf = Callable[[Lease], int]
"""Function that returns the current response length of a lease's sample, tokens."""


@dataclass
class LinearFit:
    """Least-squares line of seconds per token over the number of running sequences, with decaying weights."""

    sums: tuple[float, ...] = (0.0,) * 5
    """Weighted sums of 1, running, token_s, running^2 and running * token_s."""

    def add(self, running: float, token_s: float) -> None:
        new = (1.0, running, token_s, running * running, running * token_s)
        self.sums = tuple(DECAY * total + term for total, term in zip(self.sums, new, strict=True))

    @property
    def spread(self) -> float:
        """Standard deviation of the observed numbers of running sequences."""
        count, running, _, squares, _ = self.sums
        return max(0.0, squares / count - (running / count) ** 2) ** 0.5 if count else 0.0

    def at(self, running: float) -> float:
        """Estimated seconds per token with `running` sequences."""
        count, ran, token_s, _, products = self.sums
        variance = self.spread**2
        slope = max(0.0, (products / count - ran * token_s / count**2) / variance) if variance > 0.25 else 0.0
        mean_s = token_s / count
        return max(mean_s + slope * (running - ran / count), mean_s / 16)


NO_FIT = LinearFit()


@dataclass(frozen=True)
class WorkerLoad:
    """Current load of a worker."""

    worker: str
    running: int
    """Number of samples leased to the worker for generation."""
    has_room: bool
    """Whether the worker can take another sample."""
    step: int
    """Policy step of the worker's weights."""


@dataclass(frozen=True)
class Straggler:
    """A sample in generation whose group is expected to complete the next batch."""

    lease: Lease
    length: int
    """Current response length, tokens."""
    remaining: float
    """Expected remaining tokens."""


@dataclass
class Move:
    """The requested move of a sample to another worker."""

    sample: Sample
    lease_id: int
    """Id of the lease that is recalled for the move."""
    target: str
    """Uid of the worker to which the sample moves."""
    requested_at: float


@dataclass
class DecodeWindow:
    """Decoding of one worker within a measurement window; times are seconds on the caller's clock."""

    began_at: float
    updated_at: float
    sequence_s: float = 0.0
    """Integral of the number of running sequences over time, sequence-seconds."""
    tokens: int = 0
    """Number of tokens decoded by all sequences in the window."""


@dataclass
class Migration:
    """Decode speeds of the workers, the moves in progress, and the choice of further moves."""

    fits: defaultdict[str, LinearFit] = field(default_factory=lambda: defaultdict(LinearFit))
    """Fit of each worker's decode speed, by uid, and under "" the fit over all workers."""
    windows: dict[str, DecodeWindow] = field(default_factory=dict)
    """Current measurement window of each worker."""
    moves: list[Move] = field(default_factory=list)
    """Moves requested and not complete yet."""
    moved: dict[int, float] = field(default_factory=dict)
    """Time of the move, by the lease id under which a moved sample is generated. It does not move again under that
    lease."""
    arriving: set[int] = field(default_factory=set)
    """Ids of the leases under which moved samples are generated and have no new tokens yet."""
    prefill_s: float = 0.0
    prefill_tokens: float = 0.0
    """Tokens whose KV cache was recomputed after moves; `prefill_s` is the seconds that took. In both sums older moves
    weigh less."""

    # --- observations -------------------------------------------------------------------------------------------

    def observe_speed(self, worker: str, running: float, token_s: float) -> None:
        """Record a measurement: with `running` sequences on a worker, each sequence takes `token_s` seconds per
        token."""
        self.fits[worker].add(running, token_s)
        self.fits[""].add(running, token_s)

    def observe_tokens(self, worker: str, running: int, tokens: int, now: float, window_s: float) -> None:
        """Record new tokens of a worker that generates `running` samples; its decode speed is measured over windows of
        `window_s` seconds."""
        window = self.windows.get(worker)
        if window is None:
            self.windows[worker] = DecodeWindow(now, now)
            return
        window.sequence_s, window.updated_at = window.sequence_s + running * (now - window.updated_at), now
        window.tokens += tokens
        if (elapsed_s := now - window.began_at) >= window_s:
            if window.sequence_s and window.tokens:
                self.observe_speed(worker, window.sequence_s / elapsed_s, window.sequence_s / window.tokens)
            self.windows[worker] = DecodeWindow(now, now)

    def observe_arrival(self, lease: Lease, tokens: int, running: int, now: float) -> None:
        """Record that a moved sample has got its first `tokens` new tokens, under `lease`, from a worker that generates
        `running` samples: the time since the move, less that of decoding them, is the cost of recomputing the
        context."""
        self.arriving.discard(lease.id)
        context = lease.sample.group.prompt_tokens + lease.sample.length - tokens
        decode_s = tokens * self.token_s(lease.worker, running)
        self.observe_prefill(context, now - self.moved[lease.id] - decode_s)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record that recomputing a context of `tokens` tokens took `seconds` seconds."""
        self.prefill_s = DECAY * self.prefill_s + seconds
        self.prefill_tokens = DECAY * self.prefill_tokens + tokens

    def token_s(self, worker: str, running: int) -> float:
        """Expected seconds per token of each sequence while `running` sequences run on a worker; 0 before any
        measurement."""
        own, overall = self.fits.get(worker, NO_FIT), self.fits[""]
        if not overall.sums[0]:
            return 0.0
        return (own if own.spread > 1.0 else overall).at(running)

    # --- decisions ----------------------------------------------------------------------------------------------

    def choose(
        self, ledger: Ledger, loads: Iterable[WorkerLoad], now: float, length_of: LengthOf = attrgetter("sample.length")
    ) -> list[Move]:
        """Choose moves to request now, at most one to each worker with room. `loads`: loads of all workers; `has_room`
        is only true if no waiting sample could use that room. `length_of`: gives a sample's current length.

        A straggler moves to a worker on which it is expected to end sooner, recomputing its context included.
        """
        self.moved = {lease_id: at for lease_id, at in self.moved.items() if lease_id in ledger.leases}
        self.arriving &= self.moved.keys()
        targets = {move.target for move in self.moves}
        by_worker = {load.worker: load for load in loads}
        for measured in (self.fits, self.windows):
            for gone in measured.keys() - by_worker.keys() - {""}:
                del measured[gone]
        idle = [load for load in by_worker.values() if load.has_room and load.worker not in targets]
        if not idle or not self.fits[""].sums[0]:
            return []
        fastest_s = min(self.token_s(load.worker, load.running + 1) for load in idle)
        slowest_s = max(self.token_s(load.worker, load.running) for load in by_worker.values())
        if fastest_s > (1 - MARGIN) * slowest_s:
            return []
        excluded = self.moved.keys() | {move.lease_id for move in self.moves}
        stragglers = [straggler for straggler in _stragglers(ledger, length_of) if straggler.lease.id not in excluded]
        stragglers.sort(key=lambda straggler: straggler.remaining, reverse=True)
        chosen = []
        for target in sorted(idle, key=lambda load: self.token_s(load.worker, load.running + 1)):
            for straggler in stragglers:
                source = by_worker.get(straggler.lease.worker)
                if source and source is not target and self._pays_off(straggler, source, target):
                    chosen.append(Move(straggler.lease.sample, straggler.lease.id, target.worker, now))
                    stragglers.remove(straggler)
                    break
        self.moves += chosen
        return chosen

    def _pays_off(self, straggler: Straggler, source: WorkerLoad, target: WorkerLoad) -> bool:
        sample = straggler.lease.sample
        source_s = self.token_s(source.worker, source.running)
        target_s = self.token_s(target.worker, target.running + 1)
        if target_s >= source_s or target.step < sample.first_step:
            return False
        token_prefill_s = PRIOR_PREFILL * source_s
        if self.prefill_tokens:
            token_prefill_s = max(0.0, self.prefill_s / self.prefill_tokens)
        cost_s = token_prefill_s * (sample.group.prompt_tokens + straggler.length)
        return (source_s - target_s) * straggler.remaining - cost_s > MARGIN * source_s * straggler.remaining

    def take_returned(self, ledger: Ledger, now: float) -> list[Move]:
        """Moves whose sample has been handed back and waits for a lease; the caller leases it to the move's target at
        once.

        Moves whose sample was lost, ended or did not come back within `PATIENCE_S` are dropped. `now`: time in seconds.
        """
        returned = [move for move in self.moves if _waits(move.sample)]
        self.moves = [
            move
            for move in self.moves
            if move.sample.lease_id == move.lease_id and move.lease_id in ledger.leases
            and now - move.requested_at < PATIENCE_S
        ]  # fmt: skip
        return returned

    def confirm(self, lease: Lease, now: float) -> None:
        """Complete a move: its sample has been leased to its target as `lease`."""
        self.moved[lease.id] = now
        self.arriving.add(lease.id)


def _waits(sample: Sample) -> bool:
    return sample.state is SampleState.PARTIAL and not sample.lease_id and sample.group.state is GroupState.OPEN


def _straggler(lease: Lease, length: int, max_tokens: int) -> Straggler:
    return Straggler(lease, length, min(REMAINING_SHARE * length, max_tokens - length))


def _stragglers(ledger: Ledger, length_of: LengthOf) -> Iterator[Straggler]:
    """The generating samples of the groups that are expected to complete the next batch.

    To bound the time, only twice as many groups as the batch lacks are considered: those with the fewest pending
    samples."""
    lacking = ledger.rules.batch_groups - len(ledger.ready)
    if lacking <= 0 or not ledger.rounds.open:
        return
    by_group, max_tokens = dict[int, list[Straggler]](), ledger.rules.max_response_tokens
    for group in heapq.nsmallest(2 * lacking, ledger.open_groups(), key=attrgetter("pending_samples")):
        leases = (ledger.leases.get(sample.lease_id) for sample in group.samples)
        generating = (lease for lease in leases if lease and lease.generating)
        by_group[group.id] = [_straggler(lease, length_of(lease), max_tokens) for lease in generating]
    remaining = {
        group_id: max((straggler.remaining for straggler in stragglers), default=0.0)
        for group_id, stragglers in by_group.items()
    }
    for group_id in heapq.nsmallest(lacking, remaining, key=lambda group_id: remaining[group_id]):
        for straggler in by_group[group_id]:
            if straggler.length and not ledger.is_aborted(straggler.lease.id):
                yield straggler
