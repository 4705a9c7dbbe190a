"""Which straggler moves to another worker, and where: a pure rule over the ledger and what workers were seen to do.

It is asked while some worker has room for which nothing waits. Time is an argument.

    migration = Migration()
    migration.saw("w0", running=12, token_s=0.03)         # whenever a worker's pace is known
    for move in migration.choose(ledger, seats, now):     # asked for, and then:
        ...                                               # its lease has ended, with its tokens
    for move in migration.returned(ledger, now):
        migration.moved(lease, now)                       # leased to move.target
    migration.went_on(lease, tokens=7, running=3, now)    # its first tokens there: what the move has cost
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState, Lease, Sample, SampleState

LOOK_S = 0.5
"""how often stragglers are looked for that might move"""
REMAINS = 0.5
"""tokens that a response is expected to have still, over those that it has: with long tails, one that has become long
is far from its end. More than half would move samples that end before their move has paid"""
MARGIN = 0.05
"""a move has to end a response sooner by this share of what it still takes: paces are known about as well"""
KEPT = 0.95
"""weight of older observations against the next one: contexts grow, and a line through old ones is too low"""
PRIOR_PREFILL = 1 / 32
"""of a decoded token's time that a token of context takes, until a move has shown it"""
PATIENCE_S = 10.0
"""a sample that has not come back by then is not waited for"""
LengthOf = Callable[[Lease], int]


@dataclass
class Line:
    """Seconds that a token takes each sequence, over how many run together: least squares, the newest first."""

    sums: tuple[float, ...] = (0.0,) * 5

    def see(self, running: float, token_s: float) -> None:
        new = (1.0, running, token_s, running * running, running * token_s)
        self.sums = tuple(KEPT * old + one for old, one in zip(self.sums, new, strict=True))

    @property
    def spread(self) -> float:
        """Standard deviation of how many ran together."""
        count, running, _, squares, _ = self.sums
        return max(0.0, squares / count - (running / count) ** 2) ** 0.5 if count else 0.0

    def at(self, running: float) -> float:
        count, ran, token_s, _, products = self.sums
        variance = self.spread**2
        slope = max(0.0, (products / count - ran * token_s / count**2) / variance) if variance > 0.25 else 0.0
        mean_s = token_s / count
        return max(mean_s + slope * (running - ran / count), mean_s / 16)


NOTHING = Line()


@dataclass(frozen=True)
class Seat:
    """A worker, as it stands."""

    worker: str
    running: int
    """samples leased to it"""
    has_room: bool
    """it takes another one"""
    step: int
    """of its weights"""


@dataclass(frozen=True)
class Straggler:
    lease: Lease
    length: int
    """response tokens by now"""
    remaining: float
    """tokens that it is expected to have still"""


@dataclass
class Move:
    sample: Sample
    lease_id: int
    """that ends for it"""
    target: str
    asked_at: float


@dataclass
class Pace:
    """Of one worker, since it was last told."""

    since: float
    at: float
    sequence_s: float = 0.0
    tokens: int = 0


@dataclass
class Migration:
    lines: defaultdict[str, Line] = field(default_factory=lambda: defaultdict(Line))
    """by worker, and "" for all together"""
    paces: dict[str, Pace] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    """asked for, and not done yet"""
    settled: dict[int, float] = field(default_factory=dict)
    """leases of samples that have moved, and when: they stay where they are"""
    arriving: set[int] = field(default_factory=set)
    """those of them of which nothing has been heard"""
    context_s: float = 0.0
    contexts: float = 0.0
    """seconds and tokens of the contexts that moves have had computed anew"""

    # --- what is seen -------------------------------------------------------------------------------------------

    def saw(self, worker: str, running: float, token_s: float) -> None:
        """A token takes each of so many sequences so long."""
        self.lines[worker].see(running, token_s)
        self.lines[""].see(running, token_s)

    def reported(self, worker: str, running: int, tokens: int, now: float, every_s: float) -> None:
        """New tokens of a worker that has so many samples; its pace is that of `every_s` seconds."""
        pace = self.paces.get(worker)
        if pace is None:
            self.paces[worker] = Pace(now, now)
            return
        pace.sequence_s, pace.at = pace.sequence_s + running * (now - pace.at), now
        pace.tokens += tokens
        if now - pace.since >= every_s:
            if pace.sequence_s and pace.tokens:
                self.saw(worker, pace.sequence_s / (now - pace.since), pace.sequence_s / pace.tokens)
            self.paces[worker] = Pace(now, now)

    def went_on(self, lease: Lease, tokens: int, running: int, now: float) -> None:
        """The first tokens, so many, of a sample since it has moved; its worker has so many samples."""
        self.arriving.discard(lease.id)
        context = lease.sample.group.prompt_tokens + lease.sample.length - tokens
        self.resumed(context, now - self.settled[lease.id] - tokens * self.token_s(lease.worker, running))

    def resumed(self, context: int, seconds: float) -> None:
        """To compute so many tokens of context took so long."""
        self.context_s = KEPT * self.context_s + seconds
        self.contexts = KEPT * self.contexts + context

    def token_s(self, worker: str, running: int) -> float:
        """Seconds that a token is expected to take each of so many sequences; 0 while nothing is known."""
        own, everybody = self.lines.get(worker, NOTHING), self.lines[""]
        if not everybody.sums[0]:
            return 0.0
        return (own if own.spread > 1.0 else everybody).at(running)

    # --- what is decided ----------------------------------------------------------------------------------------

    def choose(
        self, ledger: Ledger, seats: Iterable[Seat], now: float, length_of: LengthOf = attrgetter("sample.length")
    ) -> list[Move]:
        """Moves to be asked for now, one for a worker with room at most: a sample of a group that the next batch is
        likely to have goes where it is expected to end sooner, its context computed anew included.

        That a worker has room for it says that nothing waits which it might have. `length_of`: response tokens by now.
        """
        self.settled = {lease_id: at for lease_id, at in self.settled.items() if lease_id in ledger.leases}
        self.arriving &= self.settled.keys()
        awaited = {move.target for move in self.moves}
        by_worker = {seat.worker: seat for seat in seats}
        for seen in (self.lines, self.paces):
            for gone in seen.keys() - by_worker.keys() - {""}:
                del seen[gone]
        idle = [seat for seat in by_worker.values() if seat.has_room and seat.worker not in awaited]
        if not idle or not self.lines[""].sums[0]:
            return []
        fastest_s = min(self.token_s(seat.worker, seat.running + 1) for seat in idle)
        slowest_s = max(self.token_s(seat.worker, seat.running) for seat in by_worker.values())
        if fastest_s > (1 - MARGIN) * slowest_s:
            return []
        fixed = self.settled.keys() | {move.lease_id for move in self.moves}
        stragglers = [one for one in _stragglers(ledger, length_of) if one.lease.id not in fixed]
        stragglers.sort(key=lambda one: one.remaining, reverse=True)
        chosen = []
        for seat in sorted(idle, key=lambda seat: self.token_s(seat.worker, seat.running + 1)):
            for one in stragglers:
                source = by_worker.get(one.lease.worker)
                if source and source is not seat and self._pays(one, source, seat):
                    chosen.append(Move(one.lease.sample, one.lease.id, seat.worker, now))
                    stragglers.remove(one)
                    break
        self.moves += chosen
        return chosen

    def _pays(self, one: Straggler, source: Seat, target: Seat) -> bool:
        sample = one.lease.sample
        here_s, there_s = self.token_s(source.worker, source.running), self.token_s(target.worker, target.running + 1)
        if there_s >= here_s or target.step < sample.first_step:
            return False
        prefill_s = max(0.0, self.context_s / self.contexts) if self.contexts else PRIOR_PREFILL * here_s
        costs_s = prefill_s * (sample.group.prompt_tokens + one.length)
        return (here_s - there_s) * one.remaining - costs_s > MARGIN * here_s * one.remaining

    def returned(self, ledger: Ledger, now: float) -> list[Move]:
        """Moves whose sample waits, to be leased to their target at once. Those that will not come are forgotten: a
        sample that is lost or ends meanwhile is one like any other."""
        back = [move for move in self.moves if _waits(move.sample)]
        self.moves = [
            move
            for move in self.moves
            if move.sample.lease_id == move.lease_id and move.lease_id in ledger.leases
            and now - move.asked_at < PATIENCE_S
        ]  # fmt: skip
        return back

    def moved(self, lease: Lease, now: float) -> None:
        """It has been granted to its target."""
        self.settled[lease.id] = now
        self.arriving.add(lease.id)


def _waits(sample: Sample) -> bool:
    return sample.state is SampleState.PARTIAL and not sample.lease_id and sample.group.state is GroupState.OPEN


def _straggler(lease: Lease, length: int, most: int) -> Straggler:
    return Straggler(lease, length, min(REMAINS * length, most - length))


def _stragglers(ledger: Ledger, length_of: LengthOf) -> Iterator[Straggler]:
    """Samples that the next batch is likely to wait for: of as many groups as it lacks, those that are expected to be
    complete first. Only those with the fewest responses to come are looked at, twice as many, so that a look does not
    take longer with more in flight."""
    lacking = ledger.rules.batch_groups - len(ledger.ready)
    if lacking <= 0 or not ledger.round_open:
        return
    found, most = dict[int, list[Straggler]](), ledger.rules.max_response_tokens
    for group in heapq.nsmallest(2 * lacking, ledger.open_groups(), key=attrgetter("left")):
        leases = (ledger.leases.get(sample.lease_id) for sample in group.samples)
        found[group.id] = [_straggler(lease, length_of(lease), most) for lease in leases if lease and lease.generating]
    latest = {group: max((one.remaining for one in those), default=0.0) for group, those in found.items()}
    for number in heapq.nsmallest(lacking, latest, key=lambda number: latest[number]):
        yield from (one for one in found[number] if one.length and not ledger.is_aborted(one.lease.id))
