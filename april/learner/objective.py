"""The training objective: from a batch to the trained samples, and from their log-probabilities to the loss.

`Objective.prepare` reads the whole batch once, the same on every rank; `Objective.loss` is called for each micro-batch,
and the results sum to the loss of the global batch:

    L = sum over tokens of weight * (correction * policy_loss + behaviour_coef * (log pi - log mu)^2 / 2
                                     + kl_coef * KL(pi || reference) - entropy_coef * entropy
                                     + divergence_coef * divergence(teacher, pi))

mu is the behaviour policy, which sampled the token. Tokens with advantage 0 have no behaviour term, so that they need
not be computed. With one optimizer step a batch, the current policy pi is also the policy at the start of the step.
With several, "the global batch" is the minibatch of a step, and quantities of the policy at the start come from a pass
over the whole batch before the first step (`BatchContext`).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from april.config import Config
from april.config.checks import check_algorithm
from april.config.teachers import check_over_top_k, compares_top_k
from april.learner.batch import SampleForks, TrainingBatch, TrainSample, group_forks
from april.learner.batch_metrics import batch_metrics
from april.learner.credit import compared_rewards, part_values, row_advantages, sample_rewards, sampled_token_count
from april.learner.diagnostics import StepTotals
from april.learner.losses import ADVANTAGES, CORRECTIONS, DISTILLATIONS, DIVERGENCES, LOSSES, STEP_SCALES, find_checked
from april.learner.losses.advantages import ROUNDING, has_spread, token_weights
from april.learner.losses.columns import Spans, bounded, log_ratio
from april.learner.losses.corrections import StaleTokens, interpolated_proximal
from april.learner.losses.kl import KL_ESTIMATORS, k1, k2, k3
from april.learner.losses.policy import Clip
from april.learner.losses.ranks import Ranks
from april.learner.packing import MicroBatch, minibatches, top_pairs
from april.learner.turns import mean_advantages, turn_advantages, turn_columns

# --- objective --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """Prepared training batch: its N rows that have a gradient, and metrics of all rows."""

    step: int
    """Policy step of the weights before training on the batch."""
    samples: list[TrainSample]
    advantages: np.ndarray
    """Advantage of each row that has a gradient, float64 [N]."""
    weights: np.ndarray
    """Weight in the loss of each token of a row (equal for all tokens of the row), float64 [N]."""
    batch_indices: list[int]
    """Indices of the N rows among all rows of the batch."""
    minibatches: list[int]
    """Number of the minibatch (optimizer step of an epoch) of each of the N rows, from 0."""
    batch_advantages: np.ndarray
    """Advantage of each row of the batch, with a gradient or not, float64; the mean if a row's tokens have different
    ones. With a critic it is filled in after the critic's pass."""
    spread_groups: list[list[list[int]]]
    """Nested lists: for each group whose rewards differ, for each of its samples, the indices, among the N rows, of the
    sample's rows (one row per fork)."""
    metrics: dict[str, float]
    """Metrics of the delivered batch: reward, tokens, groups, and the share of tokens by policy version."""
    token_advantages: list[np.ndarray] | None = None
    """Advantages of the sampled tokens of each of the N rows, float64 [K]; None: those of `advantages`."""
    objectives: list[int] = field(default_factory=list)
    """Number of the objective (`Algorithms.objectives`) of each of the N rows."""

    @property
    def advantages_of_tokens(self) -> list[np.ndarray]:
        """Advantages of the sampled tokens of each of the N rows, float64 [K]."""
        if self.token_advantages is not None:
            return self.token_advantages
        pairs = zip(self.samples, self.advantages, strict=True)
        return [np.full(sample.sampled_tokens, advantage) for sample, advantage in pairs]


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """Loss inputs of the K sampled tokens of S sequences, as far as they are known before the forward pass."""

    behaviour_logprobs: Tensor
    """Log-probabilities log mu under the behaviour policy, as recorded at sampling; float32 [K]."""
    advantages: Tensor
    """Advantage of each token, float32 [K]."""
    weights: Tensor
    """Weight of each token in the loss, from `token_weights`; float32 [K]."""
    ages: Tensor
    """int64 [K]: policy steps between the version that sampled a token and the current weights."""
    spans: Spans
    rewards: Tensor
    """Reward of each sequence, float32 [S]."""
    teacher_logprobs: Tensor | None = None
    """Log-probability of each token under its sample's teacher, NaN without one; float32 [K]. None without
    distillation."""
    teacher_top: Tensor | None = None
    """Pairs (id, log-probability) of the k ids that the teacher finds most likely in the place of each token, float32
    [K, k, 2]; NaN where there are fewer. None if the loss has no divergence over such ids."""
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns [K] by name: those of the scoring passes, float32; with a critic and `algorithm.turn_reward` also the
    `turn_rewards` (a turn's at its last token, else 0) and the `turns` (number of each token's turn), float64."""
    sources: Tensor | None = None
    """Index in `data.sources` of the source of each token's sample, int64 [K]; None: all of source 0."""

    @classmethod
    def concatenated(cls, parts: Sequence["ResponseTokens"], device: torch.device) -> "ResponseTokens":
        """Concatenation of the tokens of several micro-batches, or of none."""
        sequences = np.cumsum([0, *(len(part.spans.lengths) for part in parts)])
        indices = [part.spans.index + int(first) for part, first in zip(parts, sequences, strict=False)]

        def column(columns: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.cat([torch.zeros(0, dtype=dtype, device=device), *columns])

        return cls(
            column([part.behaviour_logprobs for part in parts], torch.float32),
            column([part.advantages for part in parts], torch.float32),
            column([part.weights for part in parts], torch.float32),
            column([part.ages for part in parts], torch.int64),
            Spans(column(indices, torch.int64), column([part.spans.lengths for part in parts], torch.float32)),
            column([part.rewards for part in parts], torch.float32),
            None
            if any(part.teacher_logprobs is None for part in parts)
            else column([part.teacher_logprobs for part in parts if part.teacher_logprobs is not None], torch.float32),
        )


@dataclass(frozen=True, eq=False)
class BatchContext:
    """Loss inputs of a micro-batch of K tokens computed over the whole batch, under the weights before its first
    step. Without gradients."""

    clip: Clip
    proximal_logprobs: Tensor
    """Log-probabilities under the proximal policy, around which the loss clips; float32 [K]."""
    correction_weights: Tensor
    """Product of the off-policy corrections of each token, float32 [K]."""
    truncated: Tensor
    """Whether a cap reduced the token's correction weight, bool [K]."""


@dataclass(frozen=True, eq=False)
class TrainMicroBatch:
    """A packed micro-batch with K sampled tokens, and the inputs of its loss."""

    indices: list[int]
    """Indices in `Prepared.samples` of the micro-batch's samples."""
    packed: MicroBatch
    tokens: ResponseTokens | None
    """Inputs of the loss for the sampled tokens; None for a dummy micro-batch."""
    objective: "Objective"
    """The loss of all of its samples, and of those that other ranks compute at the same time."""
    context: BatchContext | None = None
    """Loss inputs computed over all tokens of the batch; None if the configured loss has none."""


@dataclass(frozen=True)
class ScoringPass:
    """A forward pass over a whole batch before its first optimizer step, which adds columns to
    `ResponseTokens.scores`."""

    columns: tuple[str, ...]
    """Names of the columns that the model returns, in order; further ones are dropped."""
    model: str
    """Model that computes the columns: "policy", "reference" or "critic"."""
    is_needed: Callable[["Objective"], bool]
    phase: str
    """Name of the metric with the seconds of the pass."""
    activity: str
    """Activity of the learner during the pass, as its heartbeats report it."""


class Objective:
    """The loss configured by the section `[algorithm]`."""

    def __init__(self, config: Config, ranks: Ranks | None = None):
        """`ranks` share the batch; None: all ranks. Raises ConfigError for an unknown loss, advantage or correction."""
        self.section, self.ranks = config.algorithm, ranks or Ranks()
        self.max_response_tokens = config.sampling.max_response_tokens
        self.seed, self.learner = config.seed, config.learner
        check_algorithm(self.section)
        self.policy_loss = find_checked(LOSSES, self.section.loss, self.section)
        self.corrections = [find_checked(CORRECTIONS, name, self.section) for name in self.section.corrections]
        self.clip = Clip(self.section.clip_low, self.section.clip_high, self.section.dual_clip)
        self.clip_of_batch = getattr(self.policy_loss, "clip_of_batch", None)
        over_the_batch = [getattr(correction, "over_the_batch", False) for correction in self.corrections]
        steps = self.learner.minibatches * self.learner.epochs
        self.estimator = find_checked(ADVANTAGES, self.section.advantage, self.section)
        self.needs_values: bool = getattr(self.estimator, "needs_values", False)
        """Whether advantages come from a critic's values, and are thus known only once the training step has begun."""
        self.needs_norms: bool = getattr(self.estimator, "needs_norms", False)
        """Whether advantages depend on the gradient norm of each response, and are thus known only once the training
        step has begun."""
        self.needs_parts: bool = getattr(self.estimator, "needs_parts", False)
        """Whether advantages come from the parts of the reward, each normalised separately."""
        self.parts = {name: part.weight for name, part in config.reward.part.items()}
        """Weight of each part of the reward, by the part's name."""
        self.penalises_rewards = self.needs_values and config.critic.kl_coef > 0
        self.fixes_loss_inputs = bool(self.clip_of_batch) or any(over_the_batch) or steps > 1 or self.penalises_rewards
        """Whether some loss inputs depend on all tokens of the batch, scored before its first optimizer step."""
        scale = self.section.step_scale
        self.step_scale = find_checked(STEP_SCALES, scale, self.section) if scale else lambda metrics: 1.0
        """Function (metrics of an optimizer step) -> factor on its learning rate."""
        self.teachers, distillation = set(config.teacher), self.section.distillation
        self.distillation = find_checked(DISTILLATIONS, distillation, self.section) if distillation else None
        """Function (log-probabilities [K] under the teacher, under the proximal policy, token spans of the sequences,
        [algorithm]) -> advantages [K]; None: no distillation."""
        divergence = self.section.divergence
        self.divergence = find_checked(DIVERGENCES, divergence, self.section) if divergence else None
        """Function (teacher's log-probabilities [n, V], the policy's [n, V]) -> divergences [n]; None: no such loss."""
        regularised = self.section.kl_coef > 0 or self.section.entropy_coef > 0
        self.compares_top_k = compares_top_k(config, self.section)
        """Whether the divergence is from a teacher that scorers query, over the top k ids that they report, instead of
        over the whole vocabulary."""
        if self.compares_top_k:
            check_over_top_k("algorithm.divergence", divergence, imported=True)
        self.trains_every_sample = self.needs_values or regularised or bool(distillation or divergence)
        """Whether samples whose reward gives the advantage 0 have a gradient too (such as from KL or entropy terms, or
        from a teacher); otherwise their passes are skipped."""
        self.passes = [scoring for scoring in SCORING_PASSES if scoring.is_needed(self)]
        """The scoring passes (forward passes over a whole batch before its first step) that each batch needs."""

    def minibatches(self, batch: TrainingBatch) -> list[int]:
        """Number of the minibatch, from 0, that each group of a batch is assigned to, at random by seed and step."""
        rng = random.Random(f"{self.seed} {batch.step}")
        return minibatches(len(batch.groups), self.learner.minibatches, rng)

    def prepare(self, batch: TrainingBatch, of_groups: Sequence[int] | None = None) -> Prepared:
        """Advantages, token weights, minibatches and metrics of a batch; a pure function of batch and configuration.
        `of_groups`: number of the minibatch of each group; None: that from `minibatches`."""
        groups = [group_forks(group) for group in batch.groups]
        rewards, samples = sample_rewards(groups), batch.samples
        by_token = self.turn_advantages(batch.groups)
        batch_advantages = self.initial_advantages(groups) if by_token is None else mean_advantages(by_token)
        sample_tokens = np.array(
            [length for group in groups for rows in group for length in [sampled_token_count(rows)] * len(rows)]
        )
        batch_indices = [
            index
            for index, sample in enumerate(samples)
            if sample.sampled_tokens
            and (self.trains_every_sample or (batch_advantages if by_token is None else by_token)[index].any())
        ]
        trained = [samples[index] for index in batch_indices]
        group_of = [number for number, group in enumerate(batch.groups) for _ in group]
        group_minibatch = np.array(self.minibatches(batch) if of_groups is None else of_groups, np.int64)
        tokens = [sum(map(sampled_token_count, group)) for group in groups]
        sequences = [sum(sampled_token_count(rows) > 0 for rows in group) for group in groups]
        minibatch_of = group_minibatch[[group_of[index] for index in batch_indices]]
        weights = self.section.loss_weight * token_weights(
            self.section.normalisation,
            sample_tokens[batch_indices].astype(np.int64),
            np.bincount(group_minibatch, tokens)[minibatch_of],
            np.bincount(group_minibatch, sequences)[minibatch_of],
            self.section.constant_tokens or self.max_response_tokens,
        )
        prepared_index, numbers = {index: i for i, index in enumerate(batch_indices)}, iter(range(len(samples)))
        indices = [[[prepared_index.get(next(numbers)) for _ in rows] for rows in group] for group in groups]
        kept = [[[index for index in rows if index is not None] for rows in group] for group in indices]
        spread_groups = [
            list(filter(None, group)) for group, found in zip(kept, rewards, strict=True) if has_spread(found)
        ]
        with_gradient = {group_of[index] for index in batch_indices}
        return Prepared(
            batch.step,
            trained,
            batch_advantages[batch_indices],
            weights,
            batch_indices,
            minibatch_of.tolist(),
            batch_advantages,
            spread_groups,
            batch_metrics(batch.groups, with_gradient, self.section.turn_reward),
            by_token and [by_token[index] for index in batch_indices],
            [0] * len(trained),
        )

    def turn_advantages(self, groups: list[list[TrainSample]]) -> list[np.ndarray] | None:
        """Advantages of the sampled tokens of each row, float64 [K], from the returns of turns
        (`algorithm.turn_reward`); None without rewards of turns, or with a critic, which gives the advantages."""
        section = self.section
        if not section.turn_reward or self.needs_values:
            return None
        return turn_advantages(self.estimator, groups, section.turn_reward, section.turn_discount)

    def initial_advantages(self, groups: list[list[SampleForks]]) -> np.ndarray:
        """Advantages known before the step: float64, one per row. With a critic all 0; with `needs_norms` 1 for rows of
        groups with reward spread and 0 for the others, whose advantage will stay 0."""
        if self.needs_values:
            return np.zeros(sum(len(rows) for group in groups for rows in group))
        if self.needs_norms:
            spread = map(has_spread, sample_rewards(groups))
            rows = [sum(map(len, group)) for group in groups]
            return np.repeat(np.fromiter(spread, np.float64, len(groups)), rows)
        if self.needs_parts:
            weights = torch.tensor([*self.parts.values(), 1.0], dtype=torch.float64)
            values = part_values(groups, list(self.parts))
            return row_advantages(lambda *of_groups: self.estimator(*of_groups, weights), groups, values)
        return row_advantages(self.estimator, groups, compared_rewards(groups, self.section))

    def set_norm_advantages(
        self,
        prepared: Prepared,
        log_ratios: Tensor,
        squares: Tensor,
        groups: list[list[list[int]]] | None = None,
    ) -> None:
        """Compute advantages from the gradient norms of responses, and store them in `prepared`. `groups`: those of
        `prepared.spread_groups` that this objective trains; None: all. For each of the S samples in them, float64 [S]:
        `log_ratios`, log(pi / mu), and `squares`, the squared gradient norm."""
        groups = prepared.spread_groups if groups is None else groups
        sizes = [len(group) for group in groups]
        rewards = sample_rewards([[[prepared.samples[i] for i in rows] for rows in group] for group in groups])
        found = self.estimator(rewards, log_ratios.split(sizes), squares.split(sizes))
        for group, advantages_of_group in zip(groups, found, strict=True):
            for rows, advantage in zip(group, advantages_of_group.tolist(), strict=True):
                known = 0.0 if abs(advantage) < ROUNDING else advantage
                prepared.advantages[rows] = prepared.batch_advantages[np.array(prepared.batch_indices)[rows]] = known
                for row in rows:
                    if prepared.token_advantages is not None:
                        prepared.token_advantages[row] = np.full(prepared.samples[row].sampled_tokens, known)

    def tokens(self, prepared: Prepared, indices: list[int], device: torch.device) -> ResponseTokens:
        """Loss inputs for the sampled tokens of the prepared samples `indices` (at least one), concatenated in that
        order."""
        samples = [prepared.samples[i] for i in indices]
        lengths = np.array([sample.sampled_tokens for sample in samples])
        advantages = (
            np.repeat(prepared.advantages[indices], lengths)
            if prepared.token_advantages is None
            else np.concatenate([prepared.token_advantages[i] for i in indices])
        )
        of_turns = {}
        if self.section.turn_reward and self.needs_values:
            of_turns = turn_columns(samples, self.section.turn_reward)

        def column(values: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype)).to(device)

        return ResponseTokens(
            behaviour_logprobs=column(
                np.concatenate([sample.logprobs[sample.sampled_positions] for sample in samples]), np.float32
            ),
            advantages=column(advantages, np.float32),
            weights=column(np.repeat(prepared.weights[indices], lengths), np.float32),
            ages=column(np.concatenate([token_ages(sample, prepared.step) for sample in samples]), np.int64),
            spans=Spans(column(np.repeat(np.arange(len(samples)), lengths), np.int64), column(lengths, np.float32)),
            rewards=column(np.array([sample.reward for sample in samples]), np.float32),
            teacher_logprobs=column(np.concatenate(list(map(self.teacher_logprobs, samples))), np.float32)
            if self.distillation
            else None,
            teacher_top=column(top_pairs(samples, self.teachers), np.float32) if self.compares_top_k else None,
            scores={name: column(values, np.float64) for name, values in of_turns.items()},
            sources=column(np.repeat([sample.source for sample in samples], lengths), np.int64),
        )

    def teacher_logprobs(self, sample: TrainSample) -> np.ndarray:
        """Log-probabilities of a sample's K sampled tokens under its teacher, float32 [K]; NaN without a teacher."""
        found = [values for name, values in sample.token_scores.items() if name in self.teachers]
        return found[0][sample.sampled_positions] if found else np.full(sample.sampled_tokens, np.nan, np.float32)

    def distilled(self, tokens: ResponseTokens, old_logprobs: Tensor) -> ResponseTokens:
        """`tokens` with the advantages from their teachers added; `old_logprobs` [K]: those of the proximal policy."""
        if self.distillation is None or tokens.teacher_logprobs is None:
            return tokens
        teacher = torch.where(tokens.teacher_logprobs.isnan(), old_logprobs, tokens.teacher_logprobs)
        added = self.distillation(teacher, old_logprobs, tokens.spans, self.section)
        return replace(tokens, advantages=tokens.advantages + self.section.distillation_coef * added)

    def batch_contexts(
        self, scored: Sequence[tuple[ResponseTokens, Tensor]], device: torch.device
    ) -> list[BatchContext]:
        """The `BatchContext` of each of this rank's micro-batches; `scored` has their tokens and log-probabilities
        under the weights before the first optimizer step. Collective if `fixes_loss_inputs`."""
        tokens = ResponseTokens.concatenated([part for part, _ in scored], device)
        logprobs = torch.cat([torch.zeros(0, device=device), *(found for _, found in scored)])
        proximal = self.proximal_logprobs(logprobs, tokens)
        stale = self.stale_tokens(logprobs, proximal, self.distilled(tokens, proximal))
        clip = self.clip_of_batch(stale, self.clip, self.section) if self.clip_of_batch else self.clip
        lengths = [len(found) for _, found in scored]
        columns = (column.split(lengths) for column in (proximal, *self.correction_weights(stale)))
        return [BatchContext(clip, *each) for each in zip(*columns, strict=True)] if scored else []

    def loss(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        tokens: ResponseTokens,
        totals: StepTotals,
        context: BatchContext | None = None,
        divergences: Tensor | None = None,
    ) -> Tensor:
        """Contribution of a micro-batch to the loss of the global batch, a scalar; adds its metrics to `totals`.

        `logprobs`, `entropies` and, if the loss has a divergence from a teacher, `divergences`: float32 [K] with
        gradients. `tokens.scores` has the columns of all `passes`. `context` may be None unless `fixes_loss_inputs`.
        """
        context = context or self.batch_contexts([(tokens, logprobs.detach())], logprobs.device)[0]
        correction, proximal = context.correction_weights, context.proximal_logprobs
        tokens = self.distilled(tokens, proximal)
        token_losses, clipped = self.policy_loss(logprobs, proximal, tokens.advantages, tokens.spans, context.clip)
        token_losses = correction * token_losses
        if self.section.behaviour_coef:
            pull = k2(logprobs, tokens.behaviour_logprobs) * (tokens.advantages != 0)
            token_losses = token_losses + self.section.behaviour_coef * pull
        columns = {}
        if self.section.kl_coef > 0:
            divergence = KL_ESTIMATORS[self.section.kl_estimator](logprobs, tokens.scores["reference_logprobs"])
            token_losses = token_losses + self.section.kl_coef * divergence
            columns["reference_kl"] = divergence
        if divergences is not None:
            token_losses = token_losses + self.section.divergence_coef * divergences
            columns["teacher_divergence"] = divergences
        if tokens.teacher_top is not None:
            columns["teacher_top_k_mass"] = tokens.teacher_top[..., 1].exp().nan_to_num().sum(-1)
        if tokens.teacher_logprobs is not None:
            columns["teacher_kl"] = k1(logprobs.detach(), tokens.teacher_logprobs).nan_to_num()
        if self.section.entropy_coef:
            token_losses = token_losses - self.section.entropy_coef * entropies
        loss = (tokens.weights * token_losses).sum()
        current, behaviour = logprobs.detach(), tokens.behaviour_logprobs
        totals.add(
            loss,
            tokens.ages,
            log_ratio(current, behaviour).exp(),
            correction,
            tokens.sources,
            entropy=entropies,
            k1=k1(behaviour, current),
            k3=k3(behaviour, current),
            clip_fraction=clipped,
            mask_fraction=correction == 0,
            truncated_fraction=context.truncated,
            **columns,
        )
        totals.add_sequences(bounded(tokens.spans.totals(log_ratio(current, behaviour))).exp())
        return loss

    def proximal_logprobs(self, logprobs: Tensor, tokens: ResponseTokens) -> Tensor:
        """Log-probabilities of the proximal policy, around which the loss clips; [K], without gradient.
        `logprobs` [K] are those under the weights before the first optimizer step."""
        if self.section.proximal == "behaviour":
            return tokens.behaviour_logprobs
        if self.section.proximal == "recomputed":
            return logprobs.detach()
        return interpolated_proximal(logprobs, tokens.behaviour_logprobs, tokens.ages)

    def stale_tokens(self, current: Tensor, proximal: Tensor, tokens: ResponseTokens) -> StaleTokens:
        """Inputs of the off-policy corrections for `tokens`; `current` and `proximal` are log-probabilities [K] without
        gradients."""
        return StaleTokens(
            logprobs=current,
            proximal_logprobs=proximal,
            behaviour_logprobs=tokens.behaviour_logprobs,
            advantages=tokens.advantages,
            ages=tokens.ages,
            spans=tokens.spans,
            ranks=self.ranks,
        )

    def correction_weights(self, stale: StaleTokens) -> tuple[Tensor, Tensor]:
        """Product of all corrections, float32 [K], and whether a cap reduced it, bool [K]; without gradient."""
        weight, truncated = torch.ones_like(stale.logprobs), torch.zeros_like(stale.logprobs, dtype=torch.bool)
        for correction in self.corrections:
            found = correction(stale, self.section)
            weights, capped = found if isinstance(found, tuple) else (found, truncated)
            weight, truncated = weight * weights, truncated | capped
        return weight, truncated


SCORING_PASSES = (
    ScoringPass(
        ("initial_logprobs", "initial_entropies"),
        "policy",
        lambda objective: objective.fixes_loss_inputs,
        "forward_s",
        "scoring the batch",
    ),
    ScoringPass(
        ("reference_logprobs",),
        "reference",
        lambda objective: objective.section.kl_coef > 0 or objective.penalises_rewards,
        "forward_s",
        "scoring by the reference",
    ),
    ScoringPass(("values",), "critic", lambda objective: objective.needs_values, "critic_s", "computing values"),
)
"""Every scoring pass, in the order in which those that a configuration needs are run."""


def token_ages(sample: TrainSample, step: int) -> np.ndarray:
    """int64 [K]: policy steps between the version that sampled each token and weights `step`."""
    ages = [np.full(end - start, step - version.step, np.int64) for start, end, version in sample.segments]
    return np.concatenate(ages)
