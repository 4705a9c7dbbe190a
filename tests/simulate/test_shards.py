"""Several brokers for one learner: what holds for one holds for each of them, and for the batches that they make."""

import pytest

from april.config import ConfigError
from april.simulate.pipeline import simulate
from april.simulate.shards import ShardedSimulation, parts_of, simulate_shards
from tests.support.simulated_scenarios import GROWING, HARD, SCHEDULES, scenario


def test_one_broker_gives_the_same_run_as_without_shards():
    alone = scenario(cost=GROWING, **SCHEDULES["continuous"], **HARD)
    plain, sharded = simulate(alone), simulate_shards(alone, 1)
    assert sharded.shards[0].steps == plain.steps and sharded.waited_s == 0.0
    assert sharded.shards[0].measured == plain.measured


@pytest.mark.parametrize("schedule", ["sync", "april", "overlap", "bounded"])
def test_each_broker_keeps_the_bound_and_closes_its_ledger(schedule):
    whole = scenario(cost=GROWING, **SCHEDULES[schedule], **HARD, engines__count=4)
    shards = ShardedSimulation(whole, 2)
    ledgers = [pipeline.ledger for pipeline in shards.pipelines]
    found = shards.run()
    for ledger, measures in zip(ledgers, found.shards, strict=True):
        assert ledger.account.closed
        assert [step.samples for step in measures.steps] == [2 * 2] * whole.steps, "half of each batch"
        assert max(max(step.tokens_by_age) for step in measures.steps) <= whole.schedule.max_staleness
    first, second = ([(step.step, step.time_s) for step in measures.steps] for measures in found.shards)
    assert first == second, "the learner reports each step to all at once"
    assert found.waited_s > 0


def test_a_key_that_is_no_multiple_of_the_brokers_is_refused():
    with pytest.raises(ConfigError, match=r"'engines\.count' = 2 .*4 brokers"):
        parts_of(scenario(**SCHEDULES["continuous"]), 4)
