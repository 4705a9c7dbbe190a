"""Several brokers for one learner: each has its own prompts, engines and ledger, and gives its part of every batch.

The learner trains step k once all have delivered it, and reports it to all at once. Each keeps the staleness bound
among its own groups, for batches of its own size; so does the batch that their parts make.
"""

import heapq
from dataclasses import dataclass

from april.config import ConfigError
from april.simulate.measures import Measures
from april.simulate.pipeline import Pipeline, no_collections
from april.simulate.scenario import Scenario


@dataclass
class Sharded:
    """What was measured of a run of k brokers."""

    shards: list[Measures]
    waited_s: float
    """sum over the measured steps: from the first broker's part to the last one's, while the learner was free"""


def parts_of(scenario: Scenario, brokers: int) -> list[Scenario]:
    """One scenario for each broker: its part of batch, samples in flight and engines, and prompts of its own.

    Raises ConfigError unless all of that can be divided by `brokers`.
    """
    section = scenario.schedule
    whole = {
        "schedule__rollout_batch_size": section.rollout_batch_size,
        "schedule__over_sampling_batch_size": section.over_sampling_batch_size,
        "schedule__in_flight": section.in_flight,
        "engines__count": scenario.engines.count,
    }
    for key, value in whole.items():
        if value is not None and value % brokers:
            name = key.replace("__", ".")
            raise ConfigError(f"key {name!r} = {value} is no multiple of {brokers} brokers; choose one")
    part = {key: value // brokers for key, value in whole.items() if value is not None}
    return [scenario.with_keys(**part, seed=scenario.seed + 1000 * number) for number in range(brokers)]


def simulate_shards(scenario: Scenario, brokers: int) -> Sharded:
    """Run them on one clock until `steps` batches after the warm-up are trained."""
    return Shards(scenario, brokers).run()


class Shards:
    def __init__(self, scenario: Scenario, brokers: int):
        self.scenario = scenario
        self.pipelines = [Pipeline(part) for part in parts_of(scenario, brokers)]
        self.waited_s = 0.0
        self._tokens: list[int] = []
        """of the parts of the next batch that are there"""
        self._first_s = 0.0
        self._upcoming: list[tuple[float, int]] = []
        """heap of (next instant, broker); an entry with another instant than the broker's next is out of date"""
        for pipeline in self.pipelines:
            pipeline.learns = self._take

    def run(self) -> Sharded:
        with no_collections():
            self._run()
        for pipeline in self.pipelines:
            pipeline.measures.finish()
        return Sharded([pipeline.measures for pipeline in self.pipelines], self.waited_s)

    def _run(self) -> None:
        for pipeline in self.pipelines:
            pipeline.start()
        self._expect()
        while self._upcoming:
            at_s, number = heapq.heappop(self._upcoming)
            pipeline = self.pipelines[number]
            while at_s == pipeline.next_s and pipeline.ledger.consumed < pipeline.last_step:
                pipeline.next_instant()
                at_s = pipeline.next_s
                if self._upcoming and self._upcoming[0] < (at_s, number):
                    heapq.heappush(self._upcoming, (at_s, number))
                    break

    def _expect(self) -> None:
        """What comes next is another instant now, whichever broker it is of."""
        for number, pipeline in enumerate(self.pipelines):
            heapq.heappush(self._upcoming, (pipeline.next_s, number))

    def _take(self, pipeline: Pipeline, tokens: int) -> None:
        """A broker's part of the next batch; with the last of them the learner begins."""
        now_s, step = pipeline.state.now_s, pipeline.ledger.consumed
        self._first_s = self._first_s if self._tokens else now_s
        self._tokens.append(tokens)
        if len(self._tokens) < len(self.pipelines):
            return
        if step >= self.scenario.first_measured:
            self.waited_s += now_s - self._first_s
        cost = self.scenario.learner
        duration_s = cost.step_s + cost.token_s * sum(self._tokens)
        self._tokens.clear()
        for shard in self.pipelines:
            shard.measures.training_s += duration_s
            shard.learner_reports(max(now_s + duration_s, shard.weights_sent_s))
        self._expect()
