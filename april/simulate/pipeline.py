"""The broker's ledger and schedule between simulated engines and a simulated learner, on one virtual clock."""

import gc
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from april.broker.ledger.admission import Verdict
from april.broker.ledger.dead_letters import DEAD_ROUNDS
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import Lease, Sample
from april.broker.migration import CHOICE_INTERVAL_S, Migration, WorkerLoad
from april.broker.plan import make_schedule
from april.broker.schedules.schedule import choose_sample, ended_rounds
from april.simulate.engine import SimulatedEngine, SimulatedSample
from april.simulate.measures import Measures, SimulationState
from april.simulate.scenario import Scenario
from april.util.errors import ConfigError, refuse
from april.wire.message import Version
from april.wire.rows import CHUNK, FINISH_REASONS, ROW

INFINITY = float("inf")
EMPTY_CRC32 = 0
"""crc32 of an empty payload."""
LEARNER = -1
"""Value that stands for the learner where an event otherwise holds an engine index."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Context manager that turns Python's garbage collector off: a run makes no reference cycles, and searching for
    them takes a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class EndlessPrompts:
    """An endless source of empty prompts; the simulator never reads their tokens."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes]:
        return *cursor, b""


class SimulationStuck(ConfigError):
    """Raised if a simulated run is not over and has no further event, so that it would wait for ever."""


class Pipeline:
    """One simulated run. `run()` simulates it until `steps` batches after the warm-up are trained, and returns
    measures.

    Reports of workers reach the ledger at once; grants reach an engine `latency_s` later. A sample's tokens are
    reported when it ends or is returned, one chunk per policy version, which the ledger cannot tell from chunks sent in
    time.
    """

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        schedule = scenario.schedule
        self.last_step = scenario.first_measured + scenario.steps
        beyond = 0 if scenario.ends else 2 * (schedule.max_staleness + 2)
        extended = schedule.model_copy(update={"max_steps": self.last_step + beyond})
        self.schedule = make_schedule(extended, EndlessPrompts())
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
        self.index_of = {engine.name: index for index, engine in enumerate(self.engines)}
        self.state = SimulationState(scenario, self.ledger, self.schedule, self.engines)
        self.measures = Measures(self.state)
        self.training = False
        self.on_batch: Callable[[Pipeline, int], None] = Pipeline.learn
        """Called with (pipeline, tokens of the batch) when the learner receives a batch."""
        self.weights_sent_s = 0.0
        """Virtual time at which the last weights have been sent (seconds); the learner reports no trained batch
        before."""
        self._events: list[tuple[float, int, int]] = []
        """Heap of (time, sequence number, engine index or LEARNER)."""
        self._numbers = itertools.count()
        self._due = [INFINITY] * len(self.engines)
        """For each engine the time of its next event that is still valid. An entry of `_events` for that engine with
        another time is out of date, and skipped."""
        self._changed: dict[int, None] = {}
        """Indices of engines whose next event must be computed again, in the order of their last change."""
        self._by_load: list[tuple[float, int, int]] = []
        """Heap of (leased share of the engine's slots, engine index, leased samples); an entry with another number than
        the engine's current one is out of date."""
        self._migration = Migration() if schedule.migrate else None
        self._next_migration_s = 0.0
        self._failures: list[tuple[float, int]] = []
        """Heap of (time, engine index): a failure if the engine is up, otherwise its restart."""

    def _make_engines(self) -> list[SimulatedEngine]:
        engines, cost, keep_kv = self.scenario.engines, self.scenario.cost, self.scenario.weights.keep_kv
        most = engines.prefill_tokens or INFINITY
        return [
            SimulatedEngine(f"engine-{index}", cost, engines.slots, slowdown, keep_kv, engines.prefix_cache, most)
            for index, slowdown in enumerate(engines.slowdowns)
        ]

    # --- the clock ------------------------------------------------------------------------------------------

    def run(self) -> Measures:
        with no_collections():
            self.start()
            while self.ledger.steps.consumed < self.last_step:
                self.next_instant()
        self.measures.finish()
        return self.measures

    def start(self) -> None:
        for index in range(len(self.engines)):
            self._offer_slots(index)
            self._schedule_failure(index)
        self._run_broker()
        self._replan()

    @property
    def next_s(self) -> float:
        """Virtual time of the next event of this pipeline; infinite if none can happen before another pipeline (of
        another broker of the same run) has had one."""
        events_s = self._events[0][0] if self._events else INFINITY
        goes_on = self._events or self.state.down
        return min(events_s, self._failures[0][0]) if self._failures and goes_on else events_s

    def next_instant(self) -> None:
        """Process all events at the next event time, then run the broker once, as one pass of a broker's loop handles
        all waiting messages."""
        at_s = self.next_s
        if at_s == INFINITY:
            kind = self.scenario.schedule.kind
            raise SimulationStuck(
                f"schedule {kind!r} stands still in the simulation before batch {self.ledger.steps.next}, at "
                f"{self.state.now_s:.1f} s: nothing is generated or trained; try it with `april check schedule {kind}`"
            )
        if at_s > self.state.now_s:
            self.measures.add_elapsed(at_s - self.state.now_s)
            self.state.now_s = at_s
        changed = False
        while self._failures and self._failures[0][0] == at_s:
            self._fail_or_return(heapq.heappop(self._failures)[1])
            self._replan()
            changed = True
        while self._events and self._events[0][0] == at_s:
            index = heapq.heappop(self._events)[2]
            if index == LEARNER:
                self._finish_step()
                self._replan()
                changed = True
            elif at_s == self._due[index]:
                changed |= self._wake(index)
        if changed:
            self._run_broker()
        self._replan()

    def _mark_changed(self, index: int) -> None:
        """Take note that the next event of the engine with this index must be computed again."""
        self._changed.pop(index, None)
        self._changed[index] = None

    def _replan(self) -> None:
        for index in self._changed:
            at_s = self.engines[index].next_event_s
            if at_s != self._due[index]:
                self._due[index] = at_s
                if at_s < INFINITY:
                    heapq.heappush(self._events, (at_s, next(self._numbers), index))
        self._changed.clear()

    # --- engines --------------------------------------------------------------------------------------------

    def _wake(self, index: int) -> bool:
        """Process the event of the engine with this index; returns whether the broker has to react: samples were
        reported, or the engine has new weights."""
        engine, longest = self.engines[index], self.scenario.lengths.longest_tokens
        version = engine.version
        ended, returned = engine.wake()
        self._due[index] = INFINITY
        self._mark_changed(index)
        for sample in ended:
            self._report(sample, "length" if sample.acknowledged + sample.generated == longest else "stop")
        for sample in returned:
            self._report(sample)
            self.ledger.end_lease(sample.lease_id, "recall" if self.ledger.rounds.open else "abort")
        if ended or returned:
            engine.load -= len(ended) + len(returned)
            self._offer_slots(index)
        elif engine.version is not version:
            self._offer_slots(index)
        return bool(ended or returned or engine.version is not version)

    def _report(self, sample: SimulatedSample, finish_reason: str = "") -> None:
        """Report a sample's new tokens to the ledger, one chunk per policy version. With a `finish_reason` the response
        is complete, and its score is reported too; "" if it was returned unfinished."""
        ledger, table, start, chunks_left = self.ledger, b"", sample.acknowledged, len(sample.version_spans)
        finish = FINISH_REASONS.index(finish_reason)
        for (branch, step), count in sample.version_spans:
            chunks_left -= 1
            ending = 0 if chunks_left else finish
            table += ROW.pack(sample.lease_id, 0.0, start, count, branch, step, 0, EMPTY_CRC32, CHUNK, ending, 0, 0, 0)
            start += count
        if table:
            verdicts = ledger.add_chunks(table, checksum=EMPTY_CRC32)
            assert verdicts.count(Verdict.OK) == len(sample.version_spans), f"{verdicts}: {sample}"
        if finish_reason:
            ledger.score(sample.lease_id, 1.0)

    def _schedule_failure(self, index: int) -> None:
        if every_s := self.scenario.engines.failure_every_s:
            heapq.heappush(self._failures, (self.state.now_s + self.random.exponential(every_s), index))

    def _fail_or_return(self, index: int) -> None:
        engine = self.engines[index]
        if index in self.state.down:
            self.state.down.remove(index)
            engine.version = Version(0, self.ledger.steps.consumed)
            engine.load_weights(engine.version, self.state.now_s, 0.0)
            self._mark_changed(index)
            self._offer_slots(index)
            self._schedule_failure(index)
        else:
            self.state.down.add(index)
            for sample in engine.fail(self.state.now_s):
                self._report_lost(engine, sample)
            self._drop_revoked()
            self._mark_changed(index)
            heapq.heappush(self._failures, (self.state.now_s + self.scenario.engines.restart_s, index))

    def _report_lost(self, engine: SimulatedEngine, sample: SimulatedSample) -> None:
        """Report a sample of a failed engine. Only its whole chunks (of `chunk_tokens` each) had reached the broker;
        the tokens after them are lost. If its lease has ended meanwhile, all its new tokens are lost."""
        if sample.lease_id not in self.ledger.leases:
            self.state.lost_tokens += sample.generated
            return
        engine.load -= 1
        whole = sample.generated - sample.generated % self.scenario.engines.chunk_tokens
        self.state.lost_tokens += sample.generated - whole
        kept, version_spans = 0, []
        for version, count in sample.version_spans:
            if take := min(count, whole - kept):
                version_spans.append((version, take))
                kept += take
        sample.version_spans = version_spans
        self._report(sample)
        self.ledger.end_lease(sample.lease_id, "lost", f"{engine.name} has failed", self.state.now_s)

    # --- the learner ----------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Start training the next batch if one is delivered and the learner is free."""
        step = self.ledger.steps.consumed
        if self.training or step == self.ledger.steps.next:
            return
        self.training = True
        self.on_batch(self, self._batch_tokens(step))

    def learn(self, tokens: int) -> None:
        """Begin to train a batch of `tokens` tokens, and schedule the end of the step after the time that the learner's
        cost model gives."""
        cost = self.scenario.learner
        duration_s = cost.step_s + cost.token_s * tokens
        self.measures.training_s += duration_s
        self.learner_reports(max(self.state.now_s + duration_s, self.weights_sent_s))

    def learner_reports(self, at_s: float) -> None:
        """Schedule the end of the current training step at `at_s`."""
        heapq.heappush(self._events, (at_s, next(self._numbers), LEARNER))

    def _batch_tokens(self, step: int) -> int:
        return sum(group.tokens for group in self.ledger.deliveries[step])

    def _finish_step(self) -> None:
        step = self.ledger.steps.consumed
        self.training = False
        self.ledger.consume(step)
        self.measures.record_step(step, self.ledger.deliveries[step])
        self.ledger.checkpoint(step + 1, step + 1)
        weights = self.scenario.weights
        version = Version(0, step + 1)
        self.weights_sent_s = self.state.now_s + weights.transfer_s
        for index, engine in enumerate(self.engines):
            if index not in self.state.down:
                engine.load_weights(version, self.weights_sent_s, weights.pause_s)
                self._mark_changed(index)

    # --- the broker -----------------------------------------------------------------------------------------

    def _run_broker(self) -> None:
        """What a broker does each time that it has handled its messages: end and open rounds, deliver batches, stop
        samples whose lease was revoked, move stragglers, and grant leases."""
        next_step = self.ledger.steps.next
        for _ in ended_rounds(self.schedule, self.ledger):
            self._abort()
        dead = self.ledger.dead_letters.groups_in_a_row
        if dead and dead >= DEAD_ROUNDS * self.scenario.schedule.groups_per_round:
            refuse(
                "engines.failure_every_s",
                self.scenario.engines.failure_every_s,
                f"makes engines fail so often that {dead} groups in a row lost samples for good, and a run would end",
                "raise it",
            )
        for step in range(next_step, self.ledger.steps.next):
            self.measures.record_delivery(self._batch_tokens(step))
        self._drop_revoked()
        self._train()
        if self._migration:
            self._grant_migrated(self._migration)
        self._hand_out()
        if self._migration and self.state.now_s >= self._next_migration_s:
            self._next_migration_s = self.state.now_s + CHOICE_INTERVAL_S
            self._recall(self._migration)

    def _drop_revoked(self) -> None:
        """Stop the samples whose lease was revoked because their group has ended."""
        revoked, self.ledger.leases.revoked = self.ledger.leases.revoked, []
        for name, lease_id in revoked:
            index = self.index_of[name]
            sample = self.engines[index].drop(lease_id)
            self.state.lost_tokens += sample.generated if sample else 0
            self.engines[index].load -= 1
            self._mark_changed(index)
            self._offer_slots(index)

    def _abort(self) -> None:
        for index, engine in enumerate(self.engines):
            if engine.load:
                engine.recall_all(self.state.now_s)
                self._mark_changed(index)
        self._replan()

    def _offer_slots(self, index: int) -> None:
        engine = self.engines[index]
        if engine.load < engine.slots and index not in self.state.down:
            heapq.heappush(self._by_load, (engine.load / engine.slots, index, engine.load))
            if len(self._by_load) > 4 * len(self.engines) + 64:
                self._by_load = [
                    (engine.load / engine.slots, index, engine.load)
                    for index, engine in enumerate(self.engines)
                    if engine.load < engine.slots and index not in self.state.down
                ]
                heapq.heapify(self._by_load)

    def _hand_out(self) -> None:
        """Grant samples to free slots as the broker's `WorkerHandler` does: to the emptiest engine first, but a sample
        whose prefix an engine has in its cache goes to that engine."""
        no_sample_up_to = -1
        without_sample: list[tuple[float, int, int]] = []
        newest = self.ledger.steps.consumed
        while self._by_load and no_sample_up_to < newest:
            entry = heapq.heappop(self._by_load)
            _, index, load = entry
            engine = self.engines[index]
            if load != engine.load or index in self.state.down or (without_sample and entry == without_sample[-1]):
                continue
            step = engine.version.step
            sample = choose_sample(self.schedule, self.ledger, engine.version) if step > no_sample_up_to else None
            if sample is None:
                no_sample_up_to = max(no_sample_up_to, step)
                without_sample.append(entry)
                continue
            target = self._engine_with_prefix(sample, step, index)
            self._grant(sample, self.engines[target])
            self._mark_changed(target)
            self._offer_slots(target)
            if target != index:
                heapq.heappush(self._by_load, entry)
        for entry in without_sample:
            heapq.heappush(self._by_load, entry)

    def _engine_with_prefix(self, sample: Sample, step: int, emptiest: int) -> int:
        """Index of the engine that has the sample's prefix in its cache, if it has a free slot and its weights are
        those of policy step `step`; otherwise `emptiest`, the index of the emptiest engine."""
        index = self.index_of.get(sample.cached_by(step), emptiest)
        target = self.engines[index]
        can_take = index not in self.state.down and target.load < target.slots and target.version.step == step
        return index if can_take else emptiest

    def _grant_migrated(self, migration: Migration) -> None:
        """Grant each straggler that its engine has returned to the engine that it was chosen to move to, as the
        broker's `WorkerHandler` does."""
        for move in migration.take_returned(self.ledger, self.state.now_s):
            index = self.index_of[move.target]
            engine, cost = self.engines[index], self.scenario.cost
            step, can_take = engine.version.step, index not in self.state.down and engine.load < engine.slots
            if can_take and step >= move.sample.first_step and self.schedule.hands_out(self.ledger, step):
                context = self.lengths.prompt_of(move.sample.group.id) + move.sample.length
                lease = self._grant(move.sample, engine)
                migration.confirm(lease, self.state.now_s)
                migration.observe_prefill(context, cost.context_s(1, context) * engine.slowdown)
                self.state.migrated += 1
                self._mark_changed(index)
                self._offer_slots(index)

    def _recall(self, migration: Migration) -> None:
        """Choose stragglers to move to engines with free slots, and recall them from the engines that generate them.
        `migration` measures the engines' decode speeds and makes the choice."""
        loads = []
        for index, engine in enumerate(self.engines):
            if index in self.state.down:
                continue
            if running := len(engine.running):
                token_s = self.scenario.cost.steps_s(1, running, engine.kv) * engine.slowdown
                migration.observe_speed(engine.name, engine.load, token_s * engine.load / running)
            loads.append(WorkerLoad(engine.name, engine.load, engine.load < engine.slots, engine.version.step))
        for move in migration.choose(self.ledger, loads, self.state.now_s, self._length_of):
            holder = self.index_of[self.ledger.leases[move.lease_id].worker]
            self.engines[holder].recall(move.lease_id, self.state.now_s)
            self._mark_changed(holder)

    def _length_of(self, lease: Lease) -> int:
        return self.engines[self.index_of[lease.worker]].response_length(lease.id, self.state.now_s)

    def _grant(self, sample: Sample, engine: SimulatedEngine) -> Lease:
        group = sample.group.id
        lease = self.ledger.lease(sample, engine.name, engine.version.step, INFINITY)
        prompt_tokens, length = self.lengths.at(group, sample.index)
        remaining_tokens = length - sample.length
        arrives_s = self.state.now_s + self.scenario.engines.latency_s
        sample_key = group, sample.index
        engine.submit(SimulatedSample(lease.id, prompt_tokens, sample.length, remaining_tokens, arrives_s, sample_key))
        engine.load += 1
        self.state.granted += 1
        return lease


def simulate(scenario: Scenario) -> Measures:
    return Pipeline(scenario).run()
