"""The broker's ledger and schedule between simulated engines and a simulated learner, on one virtual clock."""

import gc
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import Lease, Sample
from april.broker.ledger.state import DEAD_ROUNDS
from april.broker.migration import LOOK_S, Migration, Seat
from april.broker.plan import make_schedule
from april.broker.schedules.schedule import choose_sample
from april.config import ConfigError
from april.simulate.engine import Run, SimulatedEngine
from april.simulate.measures import Measures
from april.simulate.scenario import Scenario
from april.simulate.state import SimulationState
from april.wire.rows import CHUNK, ENDINGS, ROW
from april.wire.version import Version

INFINITY = float("inf")
NO_PAYLOAD = 0
"""crc32 of nothing"""
LEARNER = -1
"""its place where events are numbered by engine"""


@contextmanager
def no_collections() -> Iterator[None]:
    """A run leaves no cycles behind, and looking for them among all that is in flight takes a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class EndlessPrompts:
    """As many prompts as a run asks for; their tokens are never looked at."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes]:
        return *cursor, b""


@dataclass(frozen=True)
class Stuck(RuntimeError):
    """Nothing will ever happen again although the run is not over."""

    step: int
    now_s: float

    def __str__(self) -> str:
        return f"the simulated run stands still at step {self.step}, {self.now_s:.1f} s"


class Pipeline:
    """One run. `run()` simulates until `steps` batches after the warm-up are trained, and gives what was measured.

    What a worker reports is in the ledger when it happens; a grant arrives `latency_s` later. Tokens are handed in when
    a sample ends or comes back, version by version, which the ledger cannot tell from chunks that came in time.
    """

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        schedule = scenario.schedule
        self.last_step = scenario.first_measured + scenario.steps
        beyond = 0 if scenario.ends else 2 * (schedule.max_staleness + 2)
        until = schedule.model_copy(update={"max_steps": self.last_step + beyond})
        self.schedule = make_schedule(until, EndlessPrompts())
        self.ledger = Ledger(
            Rules(
                schedule.rollout_batch_size,
                schedule.n_samples_per_prompt,
                schedule.max_staleness,
                min_group_size=schedule.min_group_size,
                max_response_tokens=scenario.lengths.longest_tokens,
            )
        )
        self.ledger.start_learner(0)
        self.lengths = scenario.make_lengths()
        self.random = np.random.default_rng([scenario.seed, 1])
        self.engines = self._make_engines()
        self.number_of = {engine.name: number for number, engine in enumerate(self.engines)}
        self.state = SimulationState(scenario, self.ledger, self.schedule, self.engines)
        self.measures = Measures(self.state)
        self.training = False
        self.learns: Callable[[Pipeline, int], None] = Pipeline.learn
        """called with the pipeline and the tokens of a batch when it is the learner's"""
        self.weights_sent_s = 0.0
        """when the last weights have been sent; the learner reports no batch before"""
        self._events: list[tuple[float, int, int]] = []
        """heap of (instant, running number, engine or LEARNER)"""
        self._numbers = itertools.count()
        self._due = [INFINITY] * len(self.engines)
        """the instant of each engine's event that counts"""
        self._touched: dict[int, None] = {}
        """engines to replan, in the order in which they were touched last"""
        self._by_load: list[tuple[float, int, int]] = []
        """heap of (share of slots that is leased, engine, its load); an entry with another load is out of date"""
        self._migration = Migration() if schedule.migrate else None
        self._next_look_s = 0.0
        self._failures: list[tuple[float, int]] = []
        """heap of (instant, engine), a failure if the engine is up, otherwise its return"""

    def _make_engines(self) -> list[SimulatedEngine]:
        engines, cost, keep_kv = self.scenario.engines, self.scenario.cost, self.scenario.weights.keep_kv
        return [
            SimulatedEngine(f"engine-{number}", cost, engines.slots, slowdown, keep_kv, engines.prefix_cache)
            for number, slowdown in enumerate(engines.slowdowns)
        ]

    # --- the clock ------------------------------------------------------------------------------------------

    def run(self) -> Measures:
        with no_collections():
            self.start()
            while self.ledger.consumed < self.last_step:
                self.next_instant()
        self.measures.finish()
        return self.measures

    def start(self) -> None:
        for number in range(len(self.engines)):
            self._has_room(number)
            self._schedule_failure(number)
        self._after_change()
        self._replan()

    @property
    def next_s(self) -> float:
        """When something happens next; infinite: only what others do would bring it."""
        events_s = self._events[0][0] if self._events else INFINITY
        return min(events_s, self._failures[0][0]) if self._failures else events_s

    def next_instant(self) -> None:
        """All events of the next instant, then what the broker makes of them: a pass of its loop takes all messages."""
        at_s = self.next_s
        if at_s == INFINITY:
            raise Stuck(self.ledger.next_step, self.state.now_s)
        if at_s > self.state.now_s:
            self.measures.passed(at_s - self.state.now_s)
            self.state.now_s = at_s
        changed = False
        while self._failures and self._failures[0][0] == at_s:
            self._fail_or_return(heapq.heappop(self._failures)[1])
            self._replan()
            changed = True
        while self._events and self._events[0][0] == at_s:
            number = heapq.heappop(self._events)[2]
            if number == LEARNER:
                self._trained()
                self._replan()
                changed = True
            elif at_s == self._due[number]:
                changed |= self._wake(number)
        if changed:
            self._after_change()
        self._replan()

    def _touch(self, number: int) -> None:
        """Its next event may be another now."""
        self._touched.pop(number, None)
        self._touched[number] = None

    def _replan(self) -> None:
        for number in self._touched:
            at_s = self.engines[number].next_event_s
            if at_s != self._due[number]:
                self._due[number] = at_s
                if at_s < INFINITY:
                    heapq.heappush(self._events, (at_s, next(self._numbers), number))
        self._touched.clear()

    # --- engines --------------------------------------------------------------------------------------------

    def _wake(self, number: int) -> bool:
        """An event of an engine; whether it is one for the broker, too."""
        engine, longest = self.engines[number], self.scenario.lengths.longest_tokens
        version = engine.version
        ended, handed_back = engine.wake()
        self._due[number] = INFINITY
        self._touch(number)
        for run in ended:
            self._hand_in(run, "length" if run.acknowledged + run.generated == longest else "stop")
        for run in handed_back:
            self._hand_in(run)
            self.ledger.end_lease(run.lease_id, "recall" if self.ledger.round_open else "abort")
        if ended or handed_back:
            engine.load -= len(ended) + len(handed_back)
            self._has_room(number)
        elif engine.version is not version:
            self._has_room(number)
        return bool(ended or handed_back or engine.version is not version)

    def _hand_in(self, run: Run, finish_reason: str = "") -> None:
        """Report what a sample has become, version by version, and its score if it is complete."""
        ledger, table, start, left = self.ledger, b"", run.acknowledged, len(run.pieces)
        finish = ENDINGS.index(finish_reason)
        for (branch, step), count in run.pieces:
            left -= 1
            ending = 0 if left else finish
            table += ROW.pack(run.lease_id, 0.0, start, count, branch, step, 0, NO_PAYLOAD, CHUNK, ending, 0, 0, 0)
            start += count
        if table:
            verdicts = ledger.add_chunks(table, checksum=NO_PAYLOAD)
            assert verdicts.count(Verdict.OK) == len(run.pieces), f"{verdicts}: {run}"
        if finish_reason:
            ledger.score(run.lease_id, 1.0)

    def _schedule_failure(self, number: int) -> None:
        if every_s := self.scenario.engines.failure_every_s:
            heapq.heappush(self._failures, (self.state.now_s + self.random.exponential(every_s), number))

    def _fail_or_return(self, number: int) -> None:
        engine = self.engines[number]
        if number in self.state.down:
            self.state.down.remove(number)
            engine.version = Version(0, self.ledger.consumed)
            engine.load_weights(engine.version, self.state.now_s, 0.0)
            self._touch(number)
            self._has_room(number)
            self._schedule_failure(number)
        else:
            self.state.down.add(number)
            for run in engine.fail(self.state.now_s):
                self._lose(engine, run)
            self._drop_voided()
            self._touch(number)
            heapq.heappush(self._failures, (self.state.now_s + self.scenario.engines.restart_s, number))

    def _lose(self, engine: SimulatedEngine, run: Run) -> None:
        """Of what it generated here only whole chunks had reached the broker, and nothing if its group has ended."""
        if run.lease_id not in self.ledger.leases:
            self.state.lost_tokens += run.generated
            return
        engine.load -= 1
        whole = run.generated - run.generated % self.scenario.engines.chunk_tokens
        self.state.lost_tokens += run.generated - whole
        kept, pieces = 0, []
        for version, count in run.pieces:
            if take := min(count, whole - kept):
                pieces.append((version, take))
                kept += take
        run.pieces = pieces
        self._hand_in(run)
        self.ledger.end_lease(run.lease_id, "lost", f"{engine.name} has failed", self.state.now_s)

    # --- the learner ----------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Start on the next batch if there is one and the learner is free."""
        step = self.ledger.consumed
        if self.training or step == self.ledger.next_step:
            return
        self.training = True
        self.learns(self, self._batch_tokens(step))

    def learn(self, tokens: int) -> None:
        """Train a batch of so many tokens from now on."""
        cost = self.scenario.learner
        duration_s = cost.step_s + cost.token_s * tokens
        self.measures.training_s += duration_s
        self.learner_reports(max(self.state.now_s + duration_s, self.weights_sent_s))

    def learner_reports(self, at_s: float) -> None:
        """The batch that is being trained is in the weights at that instant."""
        heapq.heappush(self._events, (at_s, next(self._numbers), LEARNER))

    def _batch_tokens(self, step: int) -> int:
        return sum(group.tokens for group in self.ledger.deliveries[step])

    def _trained(self) -> None:
        step = self.ledger.consumed
        self.training = False
        self.ledger.consume(step)
        self.measures.trained(step, self.ledger.deliveries[step])
        self.ledger.checkpoint(step + 1, step + 1)
        weights = self.scenario.weights
        version = Version(0, step + 1)
        self.weights_sent_s = self.state.now_s + weights.transfer_s
        for number, engine in enumerate(self.engines):
            if number not in self.state.down:
                engine.load_weights(version, self.weights_sent_s, weights.pause_s)
                self._touch(number)

    # --- the broker -----------------------------------------------------------------------------------------

    def _after_change(self) -> None:
        """What the broker does after it has handled messages."""
        next_step = self.ledger.next_step
        while self.schedule.advance(self.ledger):
            self._abort()
        dead = self.ledger.dead_in_a_row
        if dead and dead >= DEAD_ROUNDS * self.scenario.schedule.groups_per_round:
            raise ConfigError(
                f"key 'engines.failure_every_s' = {self.scenario.engines.failure_every_s}: engines fail so often that "
                f"{dead} groups in a row lost samples for good, and a run would end; raise it"
            )
        for step in range(next_step, self.ledger.next_step):
            self.measures.delivered(self._batch_tokens(step))
        self._drop_voided()
        self._train()
        if self._migration:
            self._grant_moved(self._migration)
        self._hand_out()
        if self._migration and self.state.now_s >= self._next_look_s:
            self._next_look_s = self.state.now_s + LOOK_S
            self._recall(self._migration)

    def _drop_voided(self) -> None:
        """Samples whose group has ended without them."""
        voided, self.ledger.voided = self.ledger.voided, []
        for name, lease_id in voided:
            number = self.number_of[name]
            run = self.engines[number].drop(lease_id)
            self.state.lost_tokens += run.generated if run else 0
            self.engines[number].load -= 1
            self._touch(number)
            self._has_room(number)

    def _abort(self) -> None:
        for number, engine in enumerate(self.engines):
            if engine.load:
                engine.take_back(self.state.now_s)
                self._touch(number)
        self._replan()

    def _has_room(self, number: int) -> None:
        engine = self.engines[number]
        if engine.load < engine.slots and number not in self.state.down:
            heapq.heappush(self._by_load, (engine.load / engine.slots, number, engine.load))
            if len(self._by_load) > 4 * len(self.engines) + 64:
                self._by_load = [
                    (engine.load / engine.slots, number, engine.load)
                    for number, engine in enumerate(self.engines)
                    if engine.load < engine.slots and number not in self.state.down
                ]
                heapq.heapify(self._by_load)

    def _hand_out(self) -> None:
        """Fill every engine as far as it has room, as the broker's `WorkerDesk` does: the emptiest first, but what an
        engine has in its cache goes there."""
        nothing_up_to = -1
        set_aside: list[tuple[float, int, int]] = []
        newest = self.ledger.consumed
        while self._by_load and nothing_up_to < newest:
            entry = heapq.heappop(self._by_load)
            _, number, load = entry
            engine = self.engines[number]
            if load != engine.load or number in self.state.down or (set_aside and entry == set_aside[-1]):
                continue
            step = engine.version.step
            sample = choose_sample(self.schedule, self.ledger, step) if step > nothing_up_to else None
            if sample is None:
                nothing_up_to = max(nothing_up_to, step)
                set_aside.append(entry)
                continue
            home = self._home(sample, step, number)
            self._grant(sample, self.engines[home])
            self._touch(home)
            self._has_room(home)
            if home != number:
                heapq.heappush(self._by_load, entry)
        for entry in set_aside:
            heapq.heappush(self._by_load, entry)

    def _home(self, sample: Sample, step: int, emptiest: int) -> int:
        """The engine that has its prefix in cache, if it has room and is at `step`, or else the emptiest."""
        number = self.number_of.get(sample.cached_by(step), emptiest)
        home = self.engines[number]
        able = number not in self.state.down and home.load < home.slots and home.version.step == step
        return number if able else emptiest

    def _grant_moved(self, migration: Migration) -> None:
        """What has come back to move goes to the engine that it was asked back for, as `WorkerDesk` does it."""
        for move in migration.returned(self.ledger, self.state.now_s):
            number = self.number_of[move.target]
            engine, cost = self.engines[number], self.scenario.cost
            step, able = engine.version.step, number not in self.state.down and engine.load < engine.slots
            if able and step >= move.sample.first_step and self.schedule.hands_out(self.ledger, step):
                context = self.lengths.prompt_of(move.sample.group.id) + move.sample.length
                lease = self._grant(move.sample, engine)
                migration.moved(lease, self.state.now_s)
                migration.resumed(context, cost.context_s(1, context) * engine.slowdown)
                self.state.moved += 1
                self._touch(number)
                self._has_room(number)

    def _recall(self, migration: Migration) -> None:
        """Ask stragglers back for engines that have room for them."""
        seats = []
        for number, engine in enumerate(self.engines):
            if number in self.state.down:
                continue
            if running := len(engine.running):
                token_s = self.scenario.cost.steps_s(1, running, engine.kv) * engine.slowdown
                migration.saw(engine.name, engine.load, token_s * engine.load / running)
            seats.append(Seat(engine.name, engine.load, engine.load < engine.slots, engine.version.step))
        for move in migration.choose(self.ledger, seats, self.state.now_s, self._length_of):
            holder = self.number_of[self.ledger.leases[move.lease_id].worker]
            self.engines[holder].recall(move.lease_id, self.state.now_s)
            self._touch(holder)

    def _length_of(self, lease: Lease) -> int:
        return self.engines[self.number_of[lease.worker]].length_of(lease.id, self.state.now_s)

    def _grant(self, sample: Sample, engine: SimulatedEngine) -> Lease:
        group = sample.group.id
        lease = self.ledger.lease(sample, engine.name, engine.version.step, INFINITY)
        prompt_tokens, length = self.lengths.at(group, sample.index)
        left = length - sample.length
        arrives_s = self.state.now_s + self.scenario.engines.latency_s
        place = group, sample.index
        engine.submit(Run(lease.id, prompt_tokens, sample.length, left, arrives_s, place))
        engine.load += 1
        self.state.handed_out += 1
        return lease


def simulate(scenario: Scenario) -> Measures:
    return Pipeline(scenario).run()
