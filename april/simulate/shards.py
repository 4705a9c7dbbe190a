"""Several brokers for one learner: each has its own prompts, engines and ledger, and delivers its part of every batch.

The learner trains step k once all brokers have delivered it, and reports it to all at once. Each broker keeps the
staleness bound for its own part of the batch, so the whole batch keeps it too.
"""

import heapq
from dataclasses import dataclass

from april.simulate.measures import Measures
from april.simulate.pipeline import Pipeline, no_collections
from april.simulate.scenario import Scenario
from april.util.errors import refuse


@dataclass
class ShardedResult:
    """Measures of a run with several brokers, one entry per broker."""

    shards: list[Measures]
    waited_s: float
    """Seconds from the first broker's part of a batch to the last one's, summed over the measured steps."""


def parts_of(scenario: Scenario, brokers: int) -> list[Scenario]:
    """One scenario per broker, with its part of the batch, of the samples in flight and of the engines.

    Raises ConfigError unless all of these are multiples of `brokers`.
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
            refuse(name, value, f"is no multiple of {brokers} brokers", "choose one")
    part = {key: value // brokers for key, value in whole.items() if value is not None}
    return [scenario.with_keys(**part, seed=scenario.seed + 1000 * index) for index in range(brokers)]


def simulate_shards(scenario: Scenario, brokers: int) -> ShardedResult:
    """Simulate all brokers on one clock until `scenario.steps` batches after the warm-up are trained; returns the
    measures of each broker."""
    return ShardedSimulation(scenario, brokers).run()


class ShardedSimulation:
    def __init__(self, scenario: Scenario, brokers: int):
        self.scenario = scenario
        self.pipelines = [Pipeline(part) for part in parts_of(scenario, brokers)]
        self.waited_s = 0.0
        self._tokens: list[int] = []
        """Numbers of tokens in the parts of the next batch that have been delivered so far, in order of delivery."""
        self._first_s = 0.0
        self._upcoming: list[tuple[float, int]] = []
        """Heap of (time of the broker's next event, broker index); an entry with another time is out of date."""
        for pipeline in self.pipelines:
            pipeline.on_batch = self._receive_part

    def run(self) -> ShardedResult:
        with no_collections():
            self._run()
        for pipeline in self.pipelines:
            pipeline.measures.finish()
        return ShardedResult([pipeline.measures for pipeline in self.pipelines], self.waited_s)

    def _run(self) -> None:
        for pipeline in self.pipelines:
            pipeline.start()
        self._schedule_all()
        while self._upcoming:
            at_s, index = heapq.heappop(self._upcoming)
            pipeline = self.pipelines[index]
            while at_s == pipeline.next_s and pipeline.ledger.steps.consumed < pipeline.last_step:
                pipeline.next_instant()
                at_s = pipeline.next_s
                if self._upcoming and self._upcoming[0] < (at_s, index):
                    heapq.heappush(self._upcoming, (at_s, index))
                    break

    def _schedule_all(self) -> None:
        """Enter every broker's next event into the heap."""
        for index, pipeline in enumerate(self.pipelines):
            heapq.heappush(self._upcoming, (pipeline.next_s, index))

    def _receive_part(self, pipeline: Pipeline, tokens: int) -> None:
        """Receive a broker's part of the next batch, with `tokens` tokens to train. The learner trains once the last
        part has come."""
        now_s, step = pipeline.state.now_s, pipeline.ledger.steps.consumed
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
        self._schedule_all()
