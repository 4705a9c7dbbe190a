"""One inference engine on the virtual clock. Decode steps between two events are counted, not simulated one by one."""

from array import array
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

from april.config.costs import EngineCost
from april.wire.message import Version

INFINITY = float("inf")
KV_HEADROOM = 0.05
"""Share of the KV cache that is kept free: no sample is admitted into it, and a preemption (retraction) of running
samples goes on until at least this much is free."""
LEASE_BITS = 36
"""Low bits of an `end_key` that hold the lease id; the high bits hold the decode step at which the sample ends."""


@dataclass(slots=True, eq=False)
class SimulatedSample:
    """One sample in one engine, from its lease to its end or return."""

    lease_id: int
    prompt_tokens: int
    acknowledged: int
    """Response tokens that the sample had when this engine leased it."""
    remaining_tokens: int
    """Response tokens still to be generated."""
    arrives_s: float
    key: tuple[int, int] | None = None
    """(group, index): key of the sample's prefix in `SimulatedEngine.cached_prefixes`."""
    generated: int = 0
    """Response tokens generated in this engine, as of the sample's last admission or preemption (retraction): tokens of
    a running sample are added only when it stops."""
    version_spans: list[tuple[Version, int]] = field(default_factory=list)
    """(policy version, tokens) of the `generated` tokens, in order."""
    begun: int = 0
    """Value of the engine's counter of decode steps at the sample's last admission."""

    @property
    def context(self) -> int:
        """Tokens of prompt and response so far: the KV tokens that the sample's admission takes."""
        return self.prompt_tokens + self.acknowledged + self.generated


def end_key(sample: SimulatedSample) -> int:
    """Sort key of a running sample: the decode step at which it ends, then its lease id."""
    return sample.begun + sample.remaining_tokens << LEASE_BITS | sample.lease_id


class SimulatedEngine:
    """An engine with continuous batching: arriving samples join at the end of a decode step, running ones continue.

    The simulation calls `wake` at the time `next_event_s`, which processes the event and returns the samples that have
    ended. A request before that (`submit`, `recall_all`, `load_weights`) may move `next_event_s` to the end of the
    current decode step.
    """

    def __init__(
        self,
        name: str,
        cost: EngineCost,
        slots: int,
        slowdown: float = 1.0,
        keep_kv: bool = True,
        prefix_cache: bool = True,
        prefill_tokens: float = INFINITY,
    ):
        """`slots`: most samples that run at a time. `prefill_tokens`: maximum context tokens admitted before the next
        decode step; one sample may have more.
        `slowdown`: factor on the times of the cost model. `keep_kv`: running samples keep their KV cache over a load of
        weights; else it is computed again. `prefix_cache`: returned samples leave their KV tokens in the cache."""
        self.name, self.cost, self.slots, self.slowdown = name, cost, slots, slowdown
        self.keep_kv, self.prefix_cache, self.prefill_tokens = keep_kv, prefix_cache, prefill_tokens
        self.load = 0
        """Number of samples leased to the engine whose end or return has not been reported to the broker yet."""
        self.version = Version(0, 0)
        """Policy version that the engine reports; it changes when a load of weights has finished."""
        self.clock_s = 0.0
        """Virtual time (seconds) up to which the engine's steps are counted. While the engine prefills or loads
        weights, it is the end of that, and so later than the simulation's time."""
        self.steps = 0
        self.kv = 0
        """Number of tokens that the running samples hold in the KV cache."""
        self.cached_prefixes: dict[tuple[int, int], int] = {}
        """Number of KV tokens that are still cached of samples that were returned unfinished, by (group, index), oldest
        first. They are kept until new weights are loaded or the cache is full."""
        self.running: dict[int, SimulatedSample] = {}
        self.waiting: deque[SimulatedSample] = deque()
        self.generated = 0
        """Response tokens generated up to `clock_s`."""
        self.prefilled_tokens = 0
        """Number of context tokens that the engine has prefilled so far: computed, not found in the cache."""
        self.recomputed_tokens = 0
        """Response tokens among the prefilled ones: generated before, and computed again."""
        self.reused_tokens = 0
        """Context tokens of admitted samples that were found in the cache."""
        self.retractions = 0
        self.kv_peak = 0
        self.pause_slot_s = 0.0
        """Slot-seconds during which running samples waited for a load of weights."""
        self.kv_wait_slot_s = 0.0
        """Slot-seconds during which samples waited for free KV cache."""
        self.transit_slot_s = 0.0
        """Slot-seconds between the arrival of samples and their admission, except for samples that waited for free KV
        cache."""
        self._ends = array("Q")
        """`end_key` of each running sample, in ascending order: the first sample to end comes first."""
        self._version_changes: tuple[list[int], list[Version]] = ([0], [Version(0, 0)])
        """Two parallel lists: first decode step, and the policy version from that step on."""
        self._staged: tuple[float, Version, float] | None = None
        """(virtual time of the request, version, pause) of weights to be loaded at the end of the current decode step;
        times in seconds. None if no load is requested."""
        self._loading: tuple[float, Version] | None = None
        """(virtual time in seconds at which the load ends, version) of the weights that are being loaded; None if none
        are."""
        self._recall_all_s: float | None = None
        self._recalls: dict[int, float] = {}
        """Time of the recall by lease id, for samples recalled one by one."""
        self._next_event: tuple[int, float] | None = None
        """(decode steps up to the next event, time of that event); None: to be computed again."""
        self._cache_full = False
        """Whether the first waiting sample does not fit into the KV cache."""
        self._admits_next = False
        """Whether the first waiting sample is admitted only after one more decode step, because it would exceed
        `prefill_tokens` in this one."""
        self._cache_full_s = -1.0
        """Last virtual time at which `_cache_full` was true (seconds); samples that had arrived by then have waited for
        KV cache."""

    # --- requests -------------------------------------------------------------------------------------------

    def submit(self, sample: SimulatedSample) -> None:
        self.waiting.append(sample)
        self._next_event = None

    def recall_all(self, now: float) -> None:
        """Request the return of all samples, running and waiting. They are returned when the current decode step
        ends."""
        self._recall_all_s = now
        self._next_event = None

    def recall(self, lease_id: int, now: float) -> None:
        """Request the return of one sample when the current decode step ends. If the sample ends with that step, it
        counts as ended."""
        self._recalls[lease_id] = now
        self._next_event = None

    def load_weights(self, version: Version, now: float, pause_s: float) -> None:
        """Load weights at the end of the current decode step; the engine pauses for `pause_s` meanwhile. They replace
        weights whose load has not begun. `now`: virtual time, seconds."""
        self._staged = (now, version, pause_s)
        self._next_event = None

    def response_length(self, lease_id: int, now: float) -> int:
        """Response tokens of a sample at the virtual time `now`, those that it had when the engine leased it included;
        0 before it runs."""
        sample = self.running.get(lease_id)
        if sample is None:
            return 0
        self._next_event = self._next_event or self._plan()
        steps = self.cost.steps_until((now - self.clock_s) / self.slowdown, len(self.running), self.kv)
        return sample.acknowledged + sample.generated + self.steps - sample.begun + min(steps, self._next_event[0])

    # --- events ---------------------------------------------------------------------------------------------

    @property
    def next_event_s(self) -> float:
        """Virtual time (seconds) of the engine's next event: a sample's end, a full KV cache, an arrival, or the end of
        the decode step at which a recall or a load of weights was asked for."""
        self._next_event = self._next_event or self._plan()
        return self._next_event[1]

    def wake(self) -> tuple[list[SimulatedSample], list[SimulatedSample]]:
        """Process the event at `next_event_s`; returns (samples that have ended, samples that were recalled and are
        returned unfinished)."""
        steps, now = self._next_event or self._plan()
        self._next_event = None
        if now < self.clock_s:
            self._finish_loading(now)
            return [], []
        self._admits_next = False
        self._count(steps)
        if self.kv > self.kv_peak:
            self.kv_peak = self.kv
        if self.cached_prefixes:
            self._evict_prefixes()
        self.clock_s = now
        if self._cache_full:
            self._cache_full_s = now
        self._finish_loading(now)
        ended = self._pop_finished()
        returned = []
        if self._recall_all_s is not None and self._recall_all_s <= now:
            returned = self._return_all(now)
        elif self._recalls:
            returned = self._return_recalled(now)
        if self._staged and self._staged[0] <= now:
            self._swap_weights(*self._staged[1:])
        if self.kv + len(self.running) > self.cost.kv_tokens:
            self._retract()
        if self.waiting:
            self._admit(now)
        return ended, returned

    def fail(self, now: float) -> list[SimulatedSample]:
        """Simulate a failure of the engine at time `now`: returns all its samples with the tokens generated so far, and
        empties it."""
        steps = self.cost.steps_until((now - self.clock_s) / self.slowdown, len(self.running), self.kv)
        self._count(max(0, steps - 1) if self.running else 0)
        if self._cache_full:
            self._cache_full_s = now
        lost = self._return_all(now)
        self.cached_prefixes.clear()
        self.clock_s, self._staged, self._loading, self._next_event = now, None, None, None
        return lost

    def drop(self, lease_id: int) -> SimulatedSample | None:
        """Take a sample whose lease was revoked out of the engine. Returns the sample; None if it has ended before."""
        sample = self._remove_sample(lease_id)
        self._sort_ends()
        self._cache_full, self._next_event = False, None
        return sample

    # --- inside ---------------------------------------------------------------------------------------------

    def _count(self, steps: int) -> None:
        """Add `steps` completed decode steps, each of which gives every running sample a token, to the engine's
        counters."""
        running = len(self.running)
        self.steps += steps
        self.kv += steps * running
        self.generated += steps * running

    def _plan(self) -> tuple[int, float]:
        """Find the next event; returns (decode steps up to it, its virtual time in seconds)."""
        if self._loading and self._loading[0] < self.clock_s:
            return 0, self._loading[0]
        running, request_s = len(self.running), self._next_request_s()
        if not running:
            return 0, max(self.clock_s, request_s)
        steps = 1 if self._admits_next else (self._ends[0] >> LEASE_BITS) - self.steps
        until_full = (self.cost.kv_tokens - self.kv) // running
        if until_full < steps and running > 1:
            steps = max(1, until_full)
        if request_s < INFINITY:
            until_request = self.cost.steps_until((request_s - self.clock_s) / self.slowdown, running, self.kv)
            steps = min(steps, until_request)
        return steps, self.clock_s + self.slowdown * self.cost.steps_s(steps, running, self.kv)

    def _next_request_s(self) -> float:
        request_s = INFINITY if self._recall_all_s is None else self._recall_all_s
        if self._recalls:
            request_s = min(request_s, *self._recalls.values())
        if self._staged:
            request_s = min(request_s, self._staged[0])
        if self._loading:
            request_s = min(request_s, self._loading[0])
        put_off = self._cache_full or (self._admits_next and self.running)
        if self.waiting and not put_off and len(self.running) < self.slots:
            request_s = min(request_s, self.waiting[0].arrives_s)
        return request_s

    def _pop_finished(self) -> list[SimulatedSample]:
        finished = []
        while self._ends and self._ends[0] >> LEASE_BITS <= self.steps:
            sample = self.running.pop(self._ends.pop(0) & (1 << LEASE_BITS) - 1)
            self._record_tokens(sample)
            self.kv -= sample.context
            self._cache_full = False
            finished.append(sample)
        return finished

    def _return_all(self, now: float) -> list[SimulatedSample]:
        for sample in self.running.values():
            self._record_tokens(sample)
            if sample.key and self.prefix_cache:
                self.cached_prefixes[sample.key] = sample.context
        arrivals_s = (sample.arrives_s for sample in self.waiting)
        self.kv_wait_slot_s += sum(now - at_s for at_s in arrivals_s if at_s <= self._cache_full_s)
        taken = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        del self._ends[:]
        self._recalls.clear()
        self.kv, self._recall_all_s, self._cache_full = 0, None, False
        return taken

    def _return_recalled(self, now: float) -> list[SimulatedSample]:
        """Return the samples recalled up to `now` that have not ended meanwhile."""
        due = [lease_id for lease_id, at in self._recalls.items() if at <= now]
        for lease_id in due:
            del self._recalls[lease_id]
        taken = [sample for sample in (self._remove_sample(lease_id) for lease_id in due) if sample]
        if taken:
            self._sort_ends()
            self._cache_full = False
        return taken

    def _remove_sample(self, lease_id: int) -> SimulatedSample | None:
        """Take the sample with this lease out of the running or waiting ones, and return it; None if it has ended."""
        sample = self.running.get(lease_id)
        if sample is None:
            sample = next((each for each in self.waiting if each.lease_id == lease_id), None)
            self.waiting = deque(each for each in self.waiting if each.lease_id != lease_id)
        else:
            self._remove(sample)
        return sample

    def _record_tokens(self, sample: SimulatedSample) -> None:
        """Add to a sample the tokens generated since its last admission, split by policy version."""
        at, end = sample.begun, self.steps
        first_steps, versions = self._version_changes
        index = bisect_right(first_steps, at) - 1
        while at < end:
            until = min(end, first_steps[index + 1]) if index + 1 < len(first_steps) else end
            if until > at:
                sample.version_spans.append((versions[index], until - at))
            at, index = until, index + 1
        sample.generated += end - sample.begun
        sample.remaining_tokens -= end - sample.begun
        sample.begun = end

    def _remove(self, sample: SimulatedSample) -> None:
        self._record_tokens(sample)
        del self.running[sample.lease_id]
        self.kv -= sample.context

    def _swap_weights(self, version: Version, pause_s: float) -> None:
        self._staged, self._loading = None, (self.clock_s + pause_s, version)
        self._finish_loading(self.clock_s)
        self.cached_prefixes.clear()
        self._change_version(version)
        if not self.keep_kv and self.kv:
            pause_s += self.cost.context_s(len(self.running), self.kv) * self.slowdown
            self.prefilled_tokens += self.kv
            prompts = sum(sample.prompt_tokens for sample in self.running.values())
            self.recomputed_tokens += self.kv - prompts
        self.clock_s += pause_s
        self.pause_slot_s += pause_s * len(self.running)

    def _finish_loading(self, now: float) -> None:
        """Set the engine's version to the new one if its load is over at time `now`. The running samples' KV cache is
        computed again only after that."""
        if self._loading and self._loading[0] <= now:
            self.version, self._loading = self._loading[1], None

    def _change_version(self, version: Version) -> None:
        """Record the version of the next steps, and forget changes before the admission of the oldest running
        sample."""
        first_steps, versions = self._version_changes
        oldest = min((sample.begun for sample in self.running.values()), default=self.steps)
        useless = bisect_right(first_steps, oldest) - 1
        del first_steps[:useless], versions[:useless]
        first_steps.append(self.steps)
        versions.append(version)

    def _evict_prefixes(self) -> None:
        """Evict cached prefixes, oldest first, until the running samples fit."""
        excess = self.kv + sum(self.cached_prefixes.values()) - self.cost.kv_tokens
        while self.cached_prefixes and excess > 0:
            excess -= self.cached_prefixes.pop(next(iter(self.cached_prefixes)))

    def _retract(self) -> None:
        """Preempt samples whose next token does not fit, those with the fewest generated tokens first."""
        if len(self.running) < 2:
            return
        youngest_first = sorted(self.running.values(), key=lambda sample: sample.generated + self.steps - sample.begun)
        for sample in youngest_first[:-1]:
            if self.kv <= self.cost.kv_tokens * (1 - KV_HEADROOM):
                break
            self._remove(sample)
            sample.arrives_s = self.clock_s
            self.waiting.appendleft(sample)
            self.retractions += 1
            self._cache_full = True
        self._sort_ends()

    def _sort_ends(self) -> None:
        self._ends = array("Q", sorted(map(end_key, self.running.values())))

    def _admit(self, now: float) -> None:
        """Admit waiting samples in order of arrival, while slots, KV cache and `prefill_tokens` allow, and add the time
        that their prefill takes to `clock_s`."""
        admitted = context = 0
        waiting, running, most = self.waiting, self.running, self.cost.kv_tokens * (1 - KV_HEADROOM)
        room = self.prefill_tokens
        while waiting and waiting[0].arrives_s <= now and len(running) < self.slots:
            sample = waiting[0]
            needed = sample.context
            if admitted and needed > room:
                self._admits_next = True
                break
            if needed > most - self.kv and running:
                self._cache_full = True
                break
            waiting.popleft()
            room -= needed
            waited_s = now - sample.arrives_s
            if sample.arrives_s <= self._cache_full_s:
                self.kv_wait_slot_s += waited_s
            else:
                self.transit_slot_s += waited_s
            found = self.cached_prefixes.pop(sample.key, 0) if sample.key else 0
            self.kv += needed
            if self.cached_prefixes:
                self._evict_prefixes()
            self.reused_tokens += found
            self.prefilled_tokens += needed - found
            self.recomputed_tokens += needed - max(sample.prompt_tokens, found)
            admitted, context = admitted + 1, context + needed - found
            sample.begun = self.steps
            running[sample.lease_id] = sample
            insort(self._ends, end_key(sample))
        if admitted:
            self.clock_s += self.cost.context_s(admitted, context) * self.slowdown
        self._cache_full = self._cache_full and bool(waiting)
