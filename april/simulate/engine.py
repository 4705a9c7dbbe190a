"""One engine on the virtual clock: between two events its decode steps are counted, not taken one by one."""

from array import array
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

from april.config.costs import EngineCost
from april.wire.version import Version

INFINITY = float("inf")
KV_HEADROOM = 0.05
"""share of the KV cache that is free after a retraction, and that an admission leaves free"""
LEASE_BITS = 36
"""of the numbers by which an engine's runs are sorted; the others are those of the step at which one ends"""


@dataclass(slots=True, eq=False)
class Run:
    """A sample in an engine's hands."""

    lease_id: int
    """of its lease"""
    prompt_tokens: int
    acknowledged: int
    """response tokens that it came with"""
    left: int
    """response tokens still to come"""
    arrives_s: float
    sample: tuple[int, int] | None = None
    """(group, index), by which it is known when it comes back"""
    generated: int = 0
    """in this engine, up to when it was last admitted or retracted"""
    pieces: list[tuple[Version, int]] = field(default_factory=list)
    """(version, tokens) generated up to then"""
    begun: int = 0
    """the engine's step count when it was last admitted"""

    @property
    def context(self) -> int:
        """Tokens in KV when it is admitted."""
        return self.prompt_tokens + self.acknowledged + self.generated


def end_of(run: Run) -> int:
    """Sorts what runs in an engine by the step at which it ends, then by its lease."""
    return run.begun + run.left << LEASE_BITS | run.lease_id


class SimulatedEngine:
    """Continuous batching: what arrives joins at the end of a decode step, and what runs goes on.

    `wake` is called at `next_event_s` and says which samples have ended; requests made meanwhile (`submit`,
    `take_back`, `load_weights`) move that instant to the end of the decode step that is under way.
    """

    def __init__(
        self,
        name: str,
        cost: EngineCost,
        slots: int,
        slowdown: float = 1.0,
        keep_kv: bool = True,
        prefix_cache: bool = True,
    ):
        self.name, self.cost, self.slots, self.slowdown = name, cost, slots, slowdown
        self.keep_kv, self.prefix_cache = keep_kv, prefix_cache
        self.load = 0
        """samples leased to it and not handed in"""
        self.version = Version(0, 0)
        """that it says it holds: newer ones once they are taken in"""
        self.clock_s = 0.0
        """the instant up to which its steps are counted; ahead of now while it computes context or takes weights"""
        self.steps = 0
        self.kv = 0
        """tokens in its cache, of what runs"""
        self.handed_back: dict[tuple[int, int], int] = {}
        """tokens in its cache of samples that it has handed back, the oldest first: they stay until new weights come or
        their room is needed"""
        self.running: dict[int, Run] = {}
        self.waiting: deque[Run] = deque()
        self.generated = 0
        """response tokens, up to `clock_s`"""
        self.prefilled_tokens = 0
        """context computed"""
        self.recomputed_tokens = 0
        """of it response tokens that had been generated before"""
        self.reused_tokens = 0
        """context found in its cache"""
        self.retractions = 0
        self.kv_peak = 0
        self.pause_slot_s = 0.0
        """slot-seconds in which weights were taken in"""
        self.kv_wait_slot_s = 0.0
        """slot-seconds in which samples waited for room in the cache"""
        self.transit_slot_s = 0.0
        """slot-seconds in which samples were on their way in"""
        self._ends = array("Q")
        """of what runs, `end_of`, sorted"""
        self._changes: tuple[list[int], list[Version]] = ([0], [Version(0, 0)])
        """from which step on which version"""
        self._staged: tuple[float, Version, float] | None = None
        self._taking: tuple[float, Version] | None = None
        """weights that are being taken in, and until when"""
        self._take_back_s: float | None = None
        self._recalled: dict[int, float] = {}
        """leases of samples that are to be handed back one by one, and since when"""
        self._planned: tuple[int, float] | None = None
        """decode steps up to the next event, and its instant; None: something has changed since"""
        self._full = False
        """the first that waits has no room"""
        self._full_s = -1.0
        """when that was last so: what had arrived by then has waited for room"""

    # --- requests -------------------------------------------------------------------------------------------

    def submit(self, run: Run) -> None:
        self.waiting.append(run)
        self._planned = None

    def take_back(self, now: float) -> None:
        """Have everything handed back at the end of the step that is under way."""
        self._take_back_s = now
        self._planned = None

    def recall(self, lease_id: int, now: float) -> None:
        """Have one sample handed back at the end of the step that is under way, unless it ends with it."""
        self._recalled[lease_id] = now
        self._planned = None

    def load_weights(self, version: Version, now: float, pause_s: float) -> None:
        """Swap weights at the end of the step that is under way; newer ones replace those not yet taken in."""
        self._staged = (now, version, pause_s)
        self._planned = None

    def length_of(self, lease_id: int, now: float) -> int:
        """Response tokens of a sample by now, those that it came with among them; 0 before it runs."""
        run = self.running.get(lease_id)
        if run is None:
            return 0
        self._planned = self._planned or self._plan()
        steps = self.cost.steps_until((now - self.clock_s) / self.slowdown, len(self.running), self.kv)
        return run.acknowledged + run.generated + self.steps - run.begun + min(steps, self._planned[0])

    # --- events ---------------------------------------------------------------------------------------------

    @property
    def next_event_s(self) -> float:
        """When to look at it next: at a finish, when the cache is full, or for what has been requested."""
        self._planned = self._planned or self._plan()
        return self._planned[1]

    def wake(self) -> tuple[list[Run], list[Run]]:
        """The event at `next_event_s`: (samples that have ended, samples handed back)."""
        steps, now = self._planned or self._plan()
        self._planned = None
        if now < self.clock_s:
            self._hold_what_was_taken(now)
            return [], []
        self._count(steps)
        if self.kv > self.kv_peak:
            self.kv_peak = self.kv
        if self.handed_back:
            self._forget_handed_back()
        self.clock_s = now
        if self._full:
            self._full_s = now
        self._hold_what_was_taken(now)
        ended = self._pop_finished()
        handed_back = []
        if self._take_back_s is not None and self._take_back_s <= now:
            handed_back = self._take_all_back(now)
        elif self._recalled:
            handed_back = self._take_recalled(now)
        if self._staged and self._staged[0] <= now:
            self._swap_weights(*self._staged[1:])
        if self.kv + len(self.running) > self.cost.kv_tokens:
            self._retract()
        if self.waiting:
            self._admit(now)
        return ended, handed_back

    def fail(self, now: float) -> list[Run]:
        """Everything it held, with what was generated up to now."""
        steps = self.cost.steps_until((now - self.clock_s) / self.slowdown, len(self.running), self.kv)
        self._count(max(0, steps - 1) if self.running else 0)
        if self._full:
            self._full_s = now
        lost = self._take_all_back(now)
        self.handed_back.clear()
        self.clock_s, self._staged, self._taking, self._planned = now, None, None, None
        return lost

    def drop(self, lease_id: int) -> Run | None:
        """Stop generating a sample whose lease is void; what it has become here, None if it has ended."""
        run = self._take_out(lease_id)
        self._sort_ends()
        self._full, self._planned = False, None
        return run

    # --- inside ---------------------------------------------------------------------------------------------

    def _count(self, steps: int) -> None:
        """Decode steps that are over."""
        running = len(self.running)
        self.steps += steps
        self.kv += steps * running
        self.generated += steps * running

    def _plan(self) -> tuple[int, float]:
        if self._taking and self._taking[0] < self.clock_s:
            return 0, self._taking[0]
        running, wanted_s = len(self.running), self._wanted_s()
        if not running:
            return 0, max(self.clock_s, wanted_s)
        steps = (self._ends[0] >> LEASE_BITS) - self.steps
        until_full = (self.cost.kv_tokens - self.kv) // running
        if until_full < steps and running > 1:
            steps = max(1, until_full)
        if wanted_s < INFINITY:
            until_wanted = self.cost.steps_until((wanted_s - self.clock_s) / self.slowdown, running, self.kv)
            steps = min(steps, until_wanted)
        return steps, self.clock_s + self.slowdown * self.cost.steps_s(steps, running, self.kv)

    def _wanted_s(self) -> float:
        wanted_s = INFINITY if self._take_back_s is None else self._take_back_s
        if self._recalled:
            wanted_s = min(wanted_s, *self._recalled.values())
        if self._staged:
            wanted_s = min(wanted_s, self._staged[0])
        if self._taking:
            wanted_s = min(wanted_s, self._taking[0])
        if self.waiting and not self._full and len(self.running) < self.slots:
            wanted_s = min(wanted_s, self.waiting[0].arrives_s)
        return wanted_s

    def _pop_finished(self) -> list[Run]:
        finished = []
        while self._ends and self._ends[0] >> LEASE_BITS <= self.steps:
            run = self.running.pop(self._ends.pop(0) & (1 << LEASE_BITS) - 1)
            self._settle(run)
            self.kv -= run.context
            self._full = False
            finished.append(run)
        return finished

    def _take_all_back(self, now: float) -> list[Run]:
        for run in self.running.values():
            self._settle(run)
            if run.sample and self.prefix_cache:
                self.handed_back[run.sample] = run.context
        self.kv_wait_slot_s += sum(now - run.arrives_s for run in self.waiting if run.arrives_s <= self._full_s)
        taken = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        del self._ends[:]
        self._recalled.clear()
        self.kv, self._take_back_s, self._full = 0, None, False
        return taken

    def _take_recalled(self, now: float) -> list[Run]:
        """Those that were recalled by now; others of them have ended."""
        due = [lease_id for lease_id, at in self._recalled.items() if at <= now]
        for lease_id in due:
            del self._recalled[lease_id]
        taken = [run for run in (self._take_out(lease_id) for lease_id in due) if run]
        if taken:
            self._sort_ends()
            self._full = False
        return taken

    def _take_out(self, lease_id: int) -> Run | None:
        """What a sample has become here; None if it has ended."""
        run = self.running.get(lease_id)
        if run is None:
            run = next((run for run in self.waiting if run.lease_id == lease_id), None)
            self.waiting = deque(run for run in self.waiting if run.lease_id != lease_id)
        else:
            self._remove(run)
        return run

    def _settle(self, run: Run) -> None:
        """Enter in the sample what it has generated since it was admitted, split by version."""
        at, end = run.begun, self.steps
        first_steps, versions = self._changes
        index = bisect_right(first_steps, at) - 1
        while at < end:
            until = min(end, first_steps[index + 1]) if index + 1 < len(first_steps) else end
            if until > at:
                run.pieces.append((versions[index], until - at))
            at, index = until, index + 1
        run.generated += end - run.begun
        run.left -= end - run.begun
        run.begun = end

    def _remove(self, run: Run) -> None:
        self._settle(run)
        del self.running[run.lease_id]
        self.kv -= run.context

    def _swap_weights(self, version: Version, pause_s: float) -> None:
        self._staged, self._taking = None, (self.clock_s + pause_s, version)
        self._hold_what_was_taken(self.clock_s)
        self.handed_back.clear()
        self._change_version(version)
        if not self.keep_kv and self.kv:
            pause_s += self.cost.context_s(len(self.running), self.kv) * self.slowdown
            self.prefilled_tokens += self.kv
            prompts = sum(run.prompt_tokens for run in self.running.values())
            self.recomputed_tokens += self.kv - prompts
        self.clock_s += pause_s
        self.pause_slot_s += pause_s * len(self.running)

    def _hold_what_was_taken(self, now: float) -> None:
        """Contexts are computed again afterwards."""
        if self._taking and self._taking[0] <= now:
            self.version, self._taking = self._taking[1], None

    def _change_version(self, version: Version) -> None:
        """From the next step on; changes before the oldest that runs was admitted are of no use any more."""
        first_steps, versions = self._changes
        oldest = min((run.begun for run in self.running.values()), default=self.steps)
        useless = bisect_right(first_steps, oldest) - 1
        del first_steps[:useless], versions[:useless]
        first_steps.append(self.steps)
        versions.append(version)

    def _forget_handed_back(self) -> None:
        """What was handed back first makes room for what runs."""
        excess = self.kv + sum(self.handed_back.values()) - self.cost.kv_tokens
        while self.handed_back and excess > 0:
            excess -= self.handed_back.pop(next(iter(self.handed_back)))

    def _retract(self) -> None:
        """The next step does not fit: those that have generated least wait until there is room."""
        if len(self.running) < 2:
            return
        youngest_first = sorted(self.running.values(), key=lambda run: run.generated + self.steps - run.begun)
        for run in youngest_first[:-1]:
            if self.kv <= self.cost.kv_tokens * (1 - KV_HEADROOM):
                break
            self._remove(run)
            run.arrives_s = self.clock_s
            self.waiting.appendleft(run)
            self.retractions += 1
            self._full = True
        self._sort_ends()

    def _sort_ends(self) -> None:
        self._ends = array("Q", sorted(map(end_of, self.running.values())))

    def _admit(self, now: float) -> None:
        admitted = context = 0
        waiting, running, most = self.waiting, self.running, self.cost.kv_tokens * (1 - KV_HEADROOM)
        while waiting and waiting[0].arrives_s <= now and len(running) < self.slots:
            run = waiting[0]
            needed = run.context
            if needed > most - self.kv and running:
                self._full = True
                break
            waiting.popleft()
            waited_s = now - run.arrives_s
            if run.arrives_s <= self._full_s:
                self.kv_wait_slot_s += waited_s
            else:
                self.transit_slot_s += waited_s
            found = self.handed_back.pop(run.sample, 0) if run.sample else 0
            self.kv += needed
            if self.handed_back:
                self._forget_handed_back()
            self.reused_tokens += found
            self.prefilled_tokens += needed - found
            self.recomputed_tokens += needed - max(run.prompt_tokens, found)
            admitted, context = admitted + 1, context + needed - found
            run.begun = self.steps
            running[run.lease_id] = run
            insort(self._ends, end_of(run))
        if admitted:
            self.clock_s += self.cost.context_s(admitted, context) * self.slowdown
        self._full = self._full and bool(waiting)
