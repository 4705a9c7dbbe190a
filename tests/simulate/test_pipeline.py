"""The simulated pipeline: the ledger's rules hold in it, tiny cases come out as computed by hand."""

import gc
from array import array
from functools import partial
from types import FunctionType, ModuleType

import numpy as np
import pytest

from april.broker.ledger.events import BatchDelivered, RowsAccepted
from april.config import ConfigError
from april.simulate.engine import SimulatedEngine
from april.simulate.measures import LENGTHS_KEPT, quantiles
from april.simulate.pipeline import Pipeline, simulate
from april.simulate.variants import no_barrier_limit, variants
from tests.support.simulated_scenarios import GROWING, HARD, MILLISECOND, PLAIN, SCHEDULES, scenario

KNOWN = {
    "sync": (161.883922, 40722, 40244, 13844),
    "april": (74.055299, 40688, 35555, 31753),
    "in steps": (240.258010, 41282, 40244, 13124),
    "dropped": (83.273923, 56293, 21704, 9076),
    "overlap": (56.856832, 40937, 35565, 17969),
    "continuous": (48.361657, 51047, 40244, 14520),
    "bounded": (53.388091, 33049, 33059, 6488),
    "recomputed": (47.776833, 46132, 40244, 47513),
    "moving": (152.181300, 40848, 40244, 14572),
}
"""time of the last step (seconds), tokens that were generated, consumed and computed as context, of seed 3"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_figures_of_a_seed_do_not_change(schedule):
    measures = simulate(scenario(cost=GROWING, **SCHEDULES[schedule], **HARD, seed=3))
    found = measures.measured
    figures = (measures.steps[-1].time_s, found.generated, found.consumed, found.prefilled)
    assert figures == pytest.approx(KNOWN[schedule], rel=1e-6)


@pytest.mark.parametrize("circumstances", [{}, HARD], ids=["calm", "hard"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ledger_closes_the_bound_holds_and_every_token_is_accounted_for(schedule, circumstances):
    pipeline = Pipeline(scenario(cost=GROWING, **SCHEDULES[schedule] | circumstances))
    ledger = pipeline.ledger
    accepted = 0

    def check(event, arrays):
        nonlocal accepted
        assert ledger.account.closed
        assert ledger.bound.holds(ledger.steps.next)
        if isinstance(event, RowsAccepted):
            accepted += sum(row.tokens for row in event.rows)
        if isinstance(event, BatchDelivered):
            oldest = min(ledger.groups[group].opened_at for group in event.groups)
            assert event.step - oldest <= ledger.rules.max_staleness

    ledger.write = check
    engines, simulated = pipeline.engines, pipeline.state
    measures = pipeline.run()
    assert measures.staleness_max <= ledger.rules.max_staleness
    in_engines = 0
    for engine in engines:
        for run in [*engine.running.values(), *engine.waiting]:
            in_engines += run.generated + (engine.steps - run.begun if run.lease_id in engine.running else 0)
    generated = ledger.account.tokens["generated"] + in_engines + simulated.lost_tokens
    assert sum(engine.generated for engine in engines) == generated
    assert accepted == ledger.account.tokens["generated"]
    assert len(measures.steps) == 12
    assert sum(step.tokens for step in measures.steps) == measures.measured.consumed
    assert sum(measures.idle_share.values()) + measures.occupancy == pytest.approx(1)
    assert (pipeline.state.lost_tokens > 0) == bool(circumstances)


@pytest.mark.parametrize("schedule", ["april", "moving"])
def test_every_trained_response_has_its_drawn_length(schedule):
    pipeline = Pipeline(scenario(cost=GROWING, engines__speed_spread=0.5, **SCHEDULES[schedule]))
    lengths, trained = pipeline.lengths, []
    note = pipeline.measures.record_step

    def compare(step, groups):
        for group in groups:
            trained.append(group.id)
            assert [sample.length for sample in group.samples] == lengths.of(group.id)
        note(step, groups)

    pipeline.measures.record_step = compare
    pipeline.run()
    assert len(set(trained)) == len(trained) == 4 * pipeline.ledger.steps.consumed


def test_migrated_stragglers_end_sooner_and_are_prefilled_on_their_new_engine():
    uneven = scenario(cost=GROWING, **SCHEDULES["sync"], engines__speed_spread=0.5)
    moving = Pipeline(uneven.with_keys(schedule__migrate=True))
    stayed, moved = simulate(uneven).measured, moving.run().measured
    assert moved.consumed == stayed.consumed and moved.time_s < 0.9 * stayed.time_s
    assert moving.state.migrated > 0 and moved.recomputed > 0 == stayed.recomputed


def test_a_sync_step_lasts_its_longest_response_training_transfer_pause_and_latency():
    """Equal engines, 10 ms a step: a batch is the longest of its responses, then training, transfer, pause and
    the way of its grants."""
    one = scenario(
        **SCHEDULES["sync"], learner__step_s=2.0, weights__transfer_s=0.5, weights__pause_s=0.25,
        engines__latency_s=0.125, warmup_steps=1, steps=5,
    )  # fmt: skip
    measures = simulate(one)
    lengths = one.make_lengths()
    expected_s = sum(
        0.01 * max(max(lengths.of(group)) for group in range(4 * step, 4 * step + 4)) + 2.0 + 0.5 + 0.25 + 0.125
        for step in range(1, 6)
    )
    assert measures.measured.time_s == pytest.approx(expected_s)
    assert measures.learner_share == pytest.approx(10.0 / expected_s)
    assert measures.staleness_max == 0 and measures.wasted_share == 0


def test_continuous_with_equal_lengths_reaches_the_no_barrier_limit():
    one = scenario(
        **SCHEDULES["continuous"], lengths__family="equal", lengths__median_tokens=100, engines__latency_s=0.0
    )
    measures = simulate(one)
    assert measures.generated_per_s == pytest.approx(16 / 0.01, rel=1e-9)
    assert no_barrier_limit(one) == pytest.approx(16 / 0.01, rel=1e-3)
    assert measures.consumed_per_s == pytest.approx(16 / 0.01, rel=0.02)


@pytest.mark.parametrize("schedule", ["april", "continuous"])
def test_a_slot_is_occupied_when_it_generates_and_not_while_its_sample_waits_for_the_cache(schedule):
    """A decode step takes 10 ms whatever runs, so that every token is 10 ms of an occupied slot."""
    cramped = PLAIN.model_copy(update={"kv_tokens": 2500})
    measures = simulate(scenario(cost=cramped, steps=40, **SCHEDULES[schedule]))
    assert measures.measured.retractions > 0 and measures.idle_share["kv"] > 0.02
    assert measures.occupancy * measures.slot_s == pytest.approx(measures.measured.generated * 0.01, rel=0.02)
    assert simulate(scenario(**SCHEDULES[schedule])).idle_share["kv"] == 0


def test_a_slot_is_leased_but_not_occupied_while_weights_are_loaded():
    """All responses 100 tokens of 10 ms. A round's are leased from when the engines hold its weights; of `continuous`
    each slot has a lease at every moment, and waits for weights once a batch."""
    keys = {
        "lengths__family": "equal", "lengths__median_tokens": 100, "engines__latency_s": 0.0, "weights__pause_s": 0.25,
    }  # fmt: skip
    rounds = simulate(scenario(**SCHEDULES["sync"], **keys))
    assert rounds.leased_share == pytest.approx(rounds.occupancy) == pytest.approx(1 / 1.25)
    assert rounds.idle_share["update"] == pytest.approx(0.25 / 1.25) and rounds.idle_share["pipeline"] == 0
    flowing = simulate(scenario(**SCHEDULES["continuous"], **keys))
    assert flowing.leased_share == pytest.approx(1)
    assert flowing.occupancy == pytest.approx(1 - flowing.idle_share["update"]) and flowing.idle_share["update"] > 0.05


@pytest.mark.parametrize("schedule", ["april", "continuous"])
def test_a_run_that_ends_trains_the_same_and_starts_no_group_that_no_batch_needs(schedule):
    keys = SCHEDULES[schedule] | {"warmup_steps": 0, "learner__step_s": 1.0}
    goes_on, ends = (Pipeline(scenario(ends=ends, **keys)) for ends in (False, True))
    going, ended = goes_on.run(), ends.run()
    assert len(ended.steps) == len(going.steps) == 12
    assert [step.tokens for step in ended.steps[:8]] == [step.tokens for step in going.steps[:8]]
    assert not ends.ledger.leases and ended.leased_share <= going.leased_share
    assert len(ends.ledger.groups) <= len(goes_on.ledger.groups)
    assert goes_on.ledger.leases


def test_dropped_work_is_counted_and_shortens_what_is_trained():
    kept, dropped = (simulate(scenario(steps=60, **SCHEDULES[name])) for name in ("april", "dropped"))
    assert kept.wasted_share == 0 < 0.2 < dropped.wasted_share
    assert dropped.mean_length < 0.9 * kept.mean_length


def test_a_round_under_the_same_weights_finds_its_partial_responses_in_the_caches():
    overlap, waiting = (
        simulate(scenario(cost=GROWING, learner__step_s=1.0, **SCHEDULES[name])) for name in ("overlap", "april")
    )
    assert overlap.reused_share > 0.2 and overlap.recomputed_share < 0.1 * waiting.recomputed_share
    assert waiting.reused_share == 0


def test_ready_groups_do_not_pile_up_behind_a_straggler():
    """1 % of the responses a hundred times as long as the others: what is ready stays near a backlog."""
    pipeline = Pipeline(
        scenario(
            schedule__kind="continuous", schedule__in_flight=48, engines__slots=64, lengths__family="bimodal",
            lengths__short_tokens=20, lengths__long_tokens=2000, steps=40,
        )
    )  # fmt: skip
    most_ready = 0

    def look(event, arrays):
        nonlocal most_ready
        most_ready = max(most_ready, len(pipeline.ledger.ready))

    pipeline.ledger.write = look
    pipeline.run()
    assert 2 * 4 <= most_ready <= 2 * 4 + 48 / 2


def test_a_slow_learner_slows_many_batches_in_flight_but_does_not_stop_them():
    """12 batches in flight, and a learner that makes 0.8 of what engines can: it always trains, and they go on."""
    pipeline = Pipeline(
        scenario(
            schedule__kind="continuous", schedule__in_flight=96, schedule__max_staleness=200, engines__slots=48,
            learner__token_s=10 * MILLISECOND / 96 / 0.8, warmup_steps=60, steps=200,
        )
    )  # fmt: skip
    least = 96

    def look(event, arrays):
        nonlocal least
        if pipeline.measures.steps:
            least = min(least, pipeline.ledger.leases.generating)

    pipeline.ledger.write = look
    measured = pipeline.run().measured
    assert measured.training_s > 0.97 * measured.time_s
    assert least > 96 / 3


def test_every_variant_of_a_scenario_runs():
    admitted, refused = variants(scenario(steps=3))
    assert len(admitted) == 8 and not refused
    for name, one in admitted.items():
        assert simulate(one).consumed_per_s > 0, name


def entries(root) -> int:
    """Everything that can be reached from an object but code, and the numbers in arrays."""
    seen, waiting, numbers = {id(root)}, [root], 0
    while waiting:
        thing = waiting.pop()
        numbers += len(thing) if isinstance(thing, array) else 0
        for other in gc.get_referents(thing):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType | int | float):
                seen.add(id(other))
                waiting.append(other)
    return len(seen) + numbers


@pytest.mark.full
def test_many_engines_need_no_more_memory_after_more_steps():
    """64 engines of 32 slots, all full: what the run holds is bounded by what is in flight, and of a step it keeps less
    than its samples."""
    pipeline = Pipeline(
        scenario(
            schedule__kind="continuous", schedule__rollout_batch_size=128, schedule__n_samples_per_prompt=8,
            schedule__in_flight=2048, schedule__max_staleness=12, engines__count=64, engines__slots=32, steps=18,
            warmup_steps=4,
        )
    )  # fmt: skip
    held, note = {}, pipeline.measures.record_step

    def weigh(step, groups):
        note(step, groups)
        if step in (9, 21):
            held[step] = entries(pipeline)

    pipeline.measures.record_step = weigh
    measures = pipeline.run()
    ledger = pipeline.ledger
    assert measures.occupancy > 0.9
    assert held[21] - held[9] < 12 * 128 * 8 * 0.75
    assert len(ledger.groups) <= 6 * 128 and len(ledger.deliveries) <= 1
    assert len(pipeline._by_load) <= 5 * 64 + 64 and len(ledger._expiries) == 0
    assert len(ledger.cohorts.waiting) < 12


def test_quantiles_stand_for_the_lengths_of_a_large_batch():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 0.7, 10_000).astype(int).tolist()
    kept = quantiles(lengths)
    assert len(kept) == LENGTHS_KEPT and set(kept) <= set(lengths)
    assert np.mean(kept) == pytest.approx(np.mean(lengths), rel=0.01)
    assert np.percentile(kept, 95) == pytest.approx(np.percentile(lengths, 95), rel=0.02)
    assert quantiles(lengths[:LENGTHS_KEPT]).tolist() == lengths[:LENGTHS_KEPT]


@pytest.mark.parametrize("schedule", ["sync", "april", "overlap", "dropped", "continuous"])
def test_the_buffer_peak_counts_open_and_ready_groups_over_the_whole_run(schedule):
    """Against the ledger's own count and what is in the engines, looked at after every event of the run."""
    pipeline = Pipeline(scenario(**SCHEDULES[schedule], engines__latency_s=0.0, learner__token_s=1e-4))
    ledger, state, most = pipeline.ledger, pipeline.state, 0

    def look(event, arrays):
        nonlocal most
        generated = sum(engine.generated for engine in state.engines)
        unreported = generated - ledger.account.tokens["generated"] - state.lost_tokens
        most = max(most, ledger.account.tokens["open"] + ledger.account.tokens["ready"] + unreported)

    ledger.write = look
    assert pipeline.run().buffer_peak_tokens == pytest.approx(most, rel=0.02)


def test_a_sample_that_uses_up_its_attempts_discards_its_group():
    """Engines fail so often that long responses use up their attempts; their siblings go, and the run goes on."""
    pipeline = Pipeline(
        scenario(**SCHEDULES["april"] | HARD | {"engines__failure_every_s": 3.0, "engines__chunk_tokens": 2000})
    )
    pipeline.run()
    ledger = pipeline.ledger
    assert ledger.account.counts["dead_sample"] > 0
    assert ledger.account.closed
    assert all(engine.load == len(ledger.leases.held.get(engine.name, ())) for engine in pipeline.engines)


def test_engines_that_fail_too_often_end_the_simulation_with_a_sentence():
    doomed = HARD | {"engines__failure_every_s": 0.5, "engines__chunk_tokens": 2000}
    with pytest.raises(ConfigError, match=r"'engines\.failure_every_s' = 0\.5 .*groups"):
        simulate(scenario(**SCHEDULES["april"] | doomed))


def test_slots_of_a_failed_engine_count_as_idle_by_failure():
    """Engines are away for 10 of 30 s."""
    often = {"engines__failure_every_s": 20.0, "engines__restart_s": 10.0, "engines__latency_s": 0.0}
    every_slot = scenario(schedule__kind="continuous", schedule__in_flight=32, steps=100, **often)
    assert simulate(every_slot).idle_share["failure"] == pytest.approx(1 / 3, abs=0.1)
    spare = every_slot.with_keys(schedule__in_flight=16)
    assert simulate(spare).idle_share["failure"] < 0.2, "the other has as many slots"


def test_a_learner_does_not_overtake_the_weights_that_it_sends():
    """Equal lengths, two batches in flight: batches are ready faster than weights arrive, and one is reported for each
    of the transfers."""
    pairs = {"lengths__family": "equal", "lengths__median_tokens": 10, "learner__step_s": 0.01}
    sending = scenario(schedule__kind="continuous", schedule__in_flight=16, weights__transfer_s=3.0, **pairs)
    pipeline = Pipeline(sending)
    arrived = set()

    def load(engine, version, now, pause_s):
        arrived.add((version, now))
        SimulatedEngine.load_weights(engine, version, now, pause_s)

    for engine in pipeline.engines:
        engine.load_weights = partial(load, engine)
    measures = pipeline.run()
    instants = sorted(now for _, now in arrived)
    assert len(instants) == pipeline.ledger.steps.consumed and min(np.diff(instants)) >= 3.0 - 1e-9
    assert measures.step_s[0] == pytest.approx(3.0)


def test_batches_that_take_no_time_are_no_measurement():
    """Two batches end at the same instant and train in no time; what lies between them has no speed."""
    free = {"learner__token_s": 0.0, "weights__transfer_s": 0.0, "lengths__family": "equal", "steps": 1}
    pairs = scenario(schedule__kind="continuous", schedule__in_flight=16, **free)
    with pytest.raises(ConfigError, match="'steps' = 1"):
        for warmup_steps in (2, 3):
            simulate(pairs.with_keys(warmup_steps=warmup_steps))
