"""The no-barrier limit: throughput of the engines when every slot is refilled at once and nothing else happens."""

import itertools

from april.simulate.engine import SimulatedEngine, SimulatedRun
from april.simulate.lengths import Lengths
from april.simulate.scenario import Scenario

WARM_UP_RUNS = 6
"""Responses per slot before the measurement begins. It also waits for as many decode steps as the longest response."""


def no_barrier_limit(scenario: Scenario) -> float:
    """Tokens per second of the scenario's engines with as many samples in flight as its schedule wants."""
    lengths, engines = scenario.make_lengths(), scenario.engines
    per_engine, more = divmod(scenario.slots_wanted, engines.count)
    slots = [per_engine + (number < more) for number in range(engines.count)]
    groups = itertools.count()
    speeds = {count: _engine_limit(scenario, lengths, count, groups) if count else 0.0 for count in sorted(set(slots))}
    return sum(speeds[count] / slowdown for count, slowdown in zip(slots, engines.slowdowns, strict=True))


def _engine_limit(scenario: Scenario, lengths: Lengths, slots: int, groups: itertools.count) -> float:
    engine = SimulatedEngine("limit", scenario.cost, slots)
    samples = ((lengths.prompt_of(group), length) for group in groups for length in lengths.of(group))
    runs = (SimulatedRun(number, prompt, 0, length, 0.0) for number, (prompt, length) in enumerate(samples))
    for _ in range(slots):
        engine.submit(next(runs))
    ended, first = 0, None
    while first is None or ended < first[0] + scenario.limit_responses:
        for _ in engine.wake()[0]:
            ended += 1
            run = next(runs)
            run.arrives_s = engine.clock_s
            engine.submit(run)
        if first is None and ended >= WARM_UP_RUNS * slots and engine.steps >= scenario.lengths.longest_tokens:
            first = ended, engine.clock_s, engine.generated
    return (engine.generated - first[2]) / (engine.clock_s - first[1])
