"""The algorithms of a run: one for all samples, or another for those of a source (`data.sources.algorithm`).

The groups of a batch are divided by algorithm. Each part is prepared and normalised as if it were the whole batch, and
the parts' losses are added:

    L = sum over parts of loss_weight * (groups of the part / groups of the batch) * L of the part

where "the batch" is a minibatch, if there are several. A micro-batch holds samples of one part, on all ranks that
compute at the same time, so that collectives and passes of other models are those of its algorithm. What a rank trains
of a batch, with its conversations beside, is a `ReadyBatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from april.config import Config
from april.config.algorithms import divided
from april.learner.batch import TrainingBatch
from april.learner.batch_metrics import batch_metrics, metrics_by_source
from april.learner.conversations import ConversationMicroBatch
from april.learner.losses.ranks import Ranks
from april.learner.objective import Objective, Prepared, TrainMicroBatch


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch prepared for this rank: its advantages, and this rank's micro-batches on the rank's device."""

    prepared: Prepared
    minibatches: list[list[TrainMicroBatch]]
    """Micro-batches of each optimizer step of an epoch, the same number on every rank; empty if no sample has a
    gradient."""
    conversations: list[list[ConversationMicroBatch]]
    """Micro-batches of conversations in each optimizer step of an epoch, the same number on every rank."""
    operations: float
    """Floating-point operations of the step, summed over all ranks."""
    prepare_s: float
    """Wall time of `Trainer.prepare`, seconds."""

    @property
    def micros(self) -> list[TrainMicroBatch]:
        return [micro for minibatch in self.minibatches for micro in minibatch]

    def split_by_minibatch(self, micros: list[TrainMicroBatch]) -> list[list[TrainMicroBatch]]:
        """Divide `micros`, updated copies of all micro-batches of this batch in their order, into one list for each
        optimizer step, as `minibatches` does."""
        rest = iter(micros)
        return [[next(rest) for _ in minibatch] for minibatch in self.minibatches]


class Algorithms:
    """The objectives of a run, and which of them trains the samples of each source."""

    def __init__(self, config: Config, ranks: Ranks | None = None):
        """`ranks` share a batch; None: all ranks of the default process group. Raises ConfigError."""
        configs = divided(config)
        self.objectives = [Objective(each, ranks) for each in configs.values()]
        """The objective of `[algorithm]`, then those of sources that have their own."""
        numbers = {source: number for number, source in enumerate(configs)}
        self.of_source = [numbers.get(source, 0) for source in range(max(1, len(config.data.prompt_sources)))]
        """Index in `objectives` of the objective of each source, by the number of the source."""
        self.used = [self.objectives[number] for number in sorted({*self.of_source})]
        """Those of `objectives` that train the samples of at least one source."""
        self.passes = list(dict.fromkeys(scoring for each in self.used for scoring in each.passes))
        """The scoring passes (forward passes over a whole batch before its first step) that any of `used` needs."""
        turn_rewards = {self.objectives[number].section.turn_reward for number in self.of_source}
        self.turn_reward = turn_rewards.pop() if len(turn_rewards) == 1 else ""
        """Name of the token score that is the reward of turns, if it is the same in all sources. Otherwise "": metrics
        of turns are then reported for each source alone."""

    def prepare(self, batch: TrainingBatch) -> Prepared:
        """Advantages, token weights, minibatches and metrics of a batch; a pure function of batch and configuration."""
        of_groups = [self.of_source[group[0].source] if group else 0 for group in batch.groups]
        prepared = self.joined(batch, of_groups) if any(self.of_source) else self.objectives[0].prepare(batch)
        if len(self.of_source) > 1:
            turn_rewards = [self.objectives[number].section.turn_reward for number in self.of_source]
            with_gradient = groups_of_rows(batch, prepared.batch_indices)
            prepared.metrics.update(metrics_by_source(batch.groups, with_gradient, turn_rewards))
        return prepared

    def joined(self, batch: TrainingBatch, of_groups: Sequence[int]) -> Prepared:
        """One `Prepared` of a whole batch, joined from its parts: the groups of each objective are prepared by that
        objective. `of_groups`: for each group the index in `objectives` of the objective that trains it."""
        minibatches = np.array(self.objectives[0].minibatches(batch), np.int64)
        group_of_row = np.repeat(np.arange(len(batch.groups)), [len(group) for group in batch.groups])
        batch_advantages = np.zeros(len(group_of_row))
        parts, indices, weights, by_token, objectives = list[Prepared](), list[int](), [], [], list[int]()
        spread_groups = list[list[list[int]]]()
        for number, objective in enumerate(self.objectives):
            own = np.flatnonzero(np.equal(of_groups, number))
            rows = np.flatnonzero(np.isin(group_of_row, own))
            of_part = TrainingBatch(batch.step, [batch.groups[group] for group in own])
            part = objective.prepare(of_part, minibatches[own].tolist())
            shares = np.bincount(minibatches[own], minlength=max(minibatches) + 1) / np.bincount(minibatches)
            first, own_groups = len(objectives), part.spread_groups
            spread_groups += [[[first + row for row in sample] for sample in group] for group in own_groups]
            batch_advantages[rows] = part.batch_advantages
            parts.append(part)
            indices += rows[part.batch_indices].tolist()
            weights.append(shares[part.minibatches] * part.weights)
            by_token += part.advantages_of_tokens
            objectives += [number] * len(part.samples)
        return Prepared(
            batch.step,
            [sample for part in parts for sample in part.samples],
            np.concatenate([part.advantages for part in parts]),
            np.concatenate(weights),
            indices,
            [minibatch for part in parts for minibatch in part.minibatches],
            batch_advantages,
            spread_groups,
            batch_metrics(batch.groups, groups_of_rows(batch, indices), self.turn_reward),
            by_token if any(part.token_advantages is not None for part in parts) else None,
            objectives,
        )


def groups_of_rows(batch: TrainingBatch, rows: Sequence[int]) -> set[int]:
    """Indices in the batch of the groups that contain these `rows`, which are indices among all rows of the batch."""
    group_of_row = np.repeat(np.arange(len(batch.groups)), [len(group) for group in batch.groups])
    return {*group_of_row[rows].tolist()}
