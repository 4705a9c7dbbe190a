"""The cost model and the simulated engine, against stepping by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.config.costs import EngineCost
from april.simulate.engine import SimulatedEngine, SimulatedSample
from april.wire.message import Version

COST = EngineCost(
    decode_base_s=5e-3, decode_running_s=1e-4, decode_kv_s=1e-6, prefill_s=1e-5, admit_s=1e-3, request_s=2e-3
)


def run_until_idle(engine):
    """[(time, run)] of every end."""
    ends = []
    while engine.next_event_s < float("inf"):
        at_s = engine.next_event_s
        ends += [(at_s, run) for run in engine.wake()[0]]
    return ends


@given(st.integers(0, 5000), st.integers(1, 600), st.integers(0, 10**6))
def test_many_steps_take_the_sum_of_single_steps(steps, running, kv):
    one_by_one = sum(COST.steps_s(1, running, kv + step * running) for step in range(min(steps, 300)))
    assert COST.steps_s(min(steps, 300), running, kv) == pytest.approx(one_by_one)


@given(st.floats(1e-3, 1e4), st.integers(1, 600), st.integers(0, 10**6))
def test_steps_until_is_the_fewest_steps_that_take_at_least_so_long(seconds, running, kv):
    steps = COST.steps_until(seconds, running, kv)
    assert COST.steps_s(steps, running, kv) >= seconds * (1 - 1e-9)
    assert COST.steps_s(steps - 1, running, kv) < seconds * (1 + 1e-9)


MOST_REQUESTS = 12


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(0, 10**6)), min_size=1, max_size=MOST_REQUESTS
    )
)
def test_samples_end_when_they_would_with_every_step_simulated(drawn):
    """Requests of (prompt, response, arrival), three slots: against a loop over single steps. Each arrives at a part of
    a microsecond of its own. Steps take whole ones from the arrival at which the engine has begun, so that none ends at
    another: there rounding would decide."""
    engine = SimulatedEngine("e", COST, slots=3)
    parts = [number / MOST_REQUESTS for number in range(MOST_REQUESTS)]
    requests = [(*one, (place + part) * 1e-6) for (*one, place), part in zip(drawn, parts, strict=False)]
    requests.sort(key=lambda one: one[2])
    for lease_id, (prompt, remaining, at) in enumerate(requests):
        engine.submit(SimulatedSample(lease_id, prompt, 0, remaining, at))
    found = {run.lease_id: at for at, run in run_until_idle(engine)}

    clock, waiting, running, expected = 0.0, list(enumerate(requests)), {}, {}
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0][1][2])
        while waiting and len(running) < 3 and waiting[0][1][2] <= clock:
            now, together = clock, []
            while waiting and len(running) < 3 and waiting[0][1][2] <= now:
                lease_id, (prompt, remaining, _) = waiting.pop(0)
                running[lease_id] = [prompt, remaining]
                together.append(prompt)
            clock += COST.context_s(len(together), sum(together))
        clock += COST.steps_s(1, len(running), sum(kv for kv, _ in running.values()))
        for state in running.values():
            state[0] += 1
            state[1] -= 1
        expected |= {lease_id: clock for lease_id, (_, remaining) in running.items() if not remaining}
        running = {lease_id: state for lease_id, state in running.items() if state[1]}
    assert found == pytest.approx(expected)


def test_a_weight_load_splits_a_sample_by_version_and_pauses_the_engine():
    engine = SimulatedEngine("e", COST, slots=2)
    engine.submit(SimulatedSample(1, 0, 0, 10, 0.0))
    engine.wake()
    taken_in_s, three_steps_s = engine.clock_s, COST.steps_s(3, 1, 0)
    engine.load_weights(Version(0, 1), taken_in_s + three_steps_s - 1e-6, pause_s=0.5)
    ((end_s, run),) = run_until_idle(engine)
    assert run.version_spans == [(Version(0, 0), 3), (Version(0, 1), 7)]
    assert end_s == pytest.approx(COST.context_s(1, 0) + COST.steps_s(10, 1, 0) + 0.5)


def test_recomputing_the_cache_takes_a_prefill_of_all_running_samples():
    ends = []
    for keep in (True, False):
        engine = SimulatedEngine("e", COST, slots=2, keep_kv=keep)
        engine.submit(SimulatedSample(1, 100, 20, 10, 0.0))
        engine.wake()
        engine.load_weights(Version(0, 1), engine.clock_s + COST.steps_s(3, 1, 120) - 1e-6, pause_s=0.0)
        ends.append(run_until_idle(engine)[0][0])
    assert ends[1] - ends[0] == pytest.approx(COST.context_s(1, 123))
    assert engine.recomputed_tokens == 20 + 23


def test_contexts_larger_than_one_prefill_are_admitted_after_another_decode_step():
    engine = SimulatedEngine("e", COST, slots=3, prefill_tokens=100)
    for lease_id in range(3):
        engine.submit(SimulatedSample(lease_id, 60, 0, 5, 0.0))
    clock, kv, ends = 0.0, 0, []
    for admitted, running, ended in ((1, 1, 0), (1, 2, 0), (1, 3, 0), (0, 3, 0), (0, 3, 1), (0, 2, 1), (0, 1, 1)):
        kv += 60 * admitted
        clock += COST.context_s(admitted, 60 * admitted) + COST.steps_s(1, running, kv)
        kv += running - 65 * ended
        ends += [clock] * ended
    assert [at for at, _ in run_until_idle(engine)] == pytest.approx(ends)


def test_a_recalled_sample_has_its_tokens_up_to_the_end_of_the_step():
    engine = SimulatedEngine("e", COST, slots=1)
    engine.submit(SimulatedSample(1, 5, 0, 10, 0.0))
    engine.submit(SimulatedSample(2, 5, 7, 10, 0.0))
    engine.wake()
    engine.recall_all(engine.clock_s + COST.steps_s(4, 1, 5) - 1e-6)
    ended, back = engine.wake()
    assert not ended and [(run.lease_id, run.generated, run.remaining_tokens) for run in back] == [
        (1, 4, 6),
        (2, 0, 10),
    ]
    assert engine.kv == 0 and engine.next_event_s == float("inf")


@pytest.mark.parametrize("interlude", ["none", "weights", "other work"])
def test_a_prefix_stays_cached_until_new_weights_or_until_its_memory_is_needed(interlude):
    engine = SimulatedEngine("e", COST.model_copy(update={"kv_tokens": 200}), slots=2)
    engine.submit(SimulatedSample(1, 100, 0, 50, 0.0, key=(0, 0)))
    engine.wake()
    engine.recall_all(engine.clock_s + COST.steps_s(20, 1, 100) - 1e-6)
    engine.wake()
    if interlude == "weights":
        engine.load_weights(Version(0, 1), engine.clock_s, pause_s=0.0)
    elif interlude == "other work":
        engine.submit(SimulatedSample(2, 150, 0, 1, engine.clock_s, key=(0, 1)))
    run_until_idle(engine)
    before = engine.prefilled_tokens
    engine.submit(SimulatedSample(3, 100, 20, 30, engine.clock_s, key=(0, 0)))
    ends = run_until_idle(engine)
    assert len(ends) == 1 and engine.generated == 50 + (interlude == "other work")
    found = 120 if interlude == "none" else 0
    assert engine.prefilled_tokens - before == 120 - found == engine.recomputed_tokens + (100 if not found else 0)
    assert engine.reused_tokens == found


def test_a_full_cache_preempts_the_samples_with_the_fewest_generated_tokens():
    cost = COST.model_copy(update={"kv_tokens": 200})
    engine = SimulatedEngine("e", cost, slots=8)
    for lease_id in range(4):
        engine.submit(SimulatedSample(lease_id, 10, 0, 90, 0.1 * lease_id))
    ends = run_until_idle(engine)
    assert ends[0][1].lease_id == 0 and len(ends) == 4
    assert engine.retractions > 0 and engine.kv_peak <= 200
    assert all(sum(count for _, count in run.version_spans) == run.generated == 90 for _, run in ends)
    assert engine.generated == 4 * 90, "nothing is generated twice"


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_sample_waits_for_the_cache_until_another_ends_or_it_is_recalled(taken_back):
    """The first sample runs, the second is too large to run with it, the third arrives later and queues after it."""
    engine = SimulatedEngine("e", COST.model_copy(update={"kv_tokens": 200}), slots=3)
    for lease_id, (prompt, remaining, at) in enumerate([(100, 60, 0.0), (95, 20, 0.0), (10, 20, 0.1)]):
        engine.submit(SimulatedSample(lease_id, prompt, 0, remaining, at))
    engine.wake()
    if taken_back:
        engine.recall_all(0.2)
        waited_until = engine.next_event_s
        engine.wake()
    else:
        waited_until = run_until_idle(engine)[0][0]
    assert engine.kv_wait_slot_s == pytest.approx(waited_until + waited_until - 0.1)
    assert engine.transit_slot_s == 0


def test_a_failed_engine_returns_all_samples_with_their_tokens():
    engine = SimulatedEngine("e", COST, slots=2)
    engine.submit(SimulatedSample(1, 0, 0, 100, 0.0))
    engine.wake()
    (lost,) = engine.fail(engine.clock_s + COST.steps_s(7, 1, 0) + 1e-6)
    assert lost.generated == 7 and engine.next_event_s == float("inf")
