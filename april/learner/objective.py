"""What a step minimises: from a batch to the samples that are trained, and from their log-probabilities to the loss.

`Objective.prepare` reads the whole batch once, the same on every rank; `Objective.loss` is called for each
micro-batch, whose shares add up to the loss of the global batch:

    sum over tokens of weight * (correction * policy loss + behaviour_coef * (log pi - log behaviour)^2 / 2
                                 + kl_coef * KL(pi || reference) - entropy_coef * entropy)

where tokens without an advantage have no pull towards their behaviour policy, so that they need not be computed.
With one optimizer step a batch, pi at hand is also the policy at the start of the step. With several, "the global
batch" is the minibatch of a step, and what depends on the policy at the start is taken from a pass over all of the
batch before the first (`OfBatch`).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from april.config import Config
from april.config.checks import check_algorithm
from april.learner.batch import Batch, Session, TrainSample, sessions
from april.learner.diagnostics import TokenTotals
from april.learner.loops import loops
from april.learner.losses import ADVANTAGES, CORRECTIONS, LOSSES, STEP_SCALES
from april.learner.losses.advantages import ROUNDING, advantages, has_spread
from april.learner.losses.columns import Spans, bounded, log_ratio
from april.learner.losses.corrections import StaleTokens, interpolated_proximal
from april.learner.losses.divergence import KL_ESTIMATORS, k1, k2, k3
from april.learner.losses.normalisation import token_weights
from april.learner.losses.policy import Clip
from april.learner.losses.ranks import Ranks
from april.learner.minibatches import minibatches

MAX_VERSIONS = 64
"""policy versions whose share of a batch is told apart; metrics of a step are limited in number"""


@dataclass(frozen=True, eq=False)
class Prepared:
    """The samples of a batch that have a gradient, and figures of the whole batch."""

    step: int
    """of the weights at hand"""
    samples: list[TrainSample]
    advantages: np.ndarray
    """float64, one a sample"""
    weights: np.ndarray
    """float64, one a sample: what each of its tokens weighs in the loss"""
    places: list[int]
    """of the samples among those of the batch"""
    minibatches: list[int]
    """the one that each sample is trained in"""
    of_batch: np.ndarray
    """float64, the advantage of every sample of the batch; with a critic the mean over its tokens, once there is one"""
    compared: list[list[list[int]]]
    """of each group whose rewards differ, of each of its sessions: the samples, among those here"""
    metrics: dict[str, float]
    """of the batch as it came: reward, tokens, groups, and the share of tokens by policy version"""


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """What is known of the K sampled tokens of a micro-batch before the forward pass."""

    behaviour_logprobs: Tensor
    """float32 [K]"""
    advantages: Tensor
    """float32 [K]"""
    weights: Tensor
    """float32 [K]"""
    ages: Tensor
    """int64 [K]: steps between the version that sampled a token and the weights at hand"""
    spans: Spans
    rewards: Tensor
    """float32 [S]: of each sequence"""

    @classmethod
    def joined(cls, parts: Sequence["ResponseTokens"], device: torch.device) -> "ResponseTokens":
        """Those of several micro-batches, or of none, end to end."""
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
        )


@dataclass(frozen=True, eq=False)
class OfBatch:
    """What the loss of a micro-batch of K tokens takes from all tokens of its batch, before its first step."""

    clip: Clip
    proximal: Tensor
    """float32 [K], as of `Objective.proximal`"""
    weight: Tensor
    """float32 [K], as of `Objective.correction`"""
    truncated: Tensor
    """bool [K]"""


class Objective:
    """`section` is the configuration's `[algorithm]`."""

    def __init__(self, config: Config, ranks: Ranks | None = None):
        """`ranks` have a part of a batch each; None: all. Raises ConfigError for a loss or correction that cannot be
        found."""
        self.section, self.ranks = config.algorithm, ranks or Ranks()
        self.max_response_tokens = config.sampling.max_response_tokens
        self.seed, self.learner = config.seed, config.learner
        check_algorithm(self.section)
        self.policy_loss = LOSSES.find(self.section.loss)
        self.corrections = [CORRECTIONS.find(name) for name in self.section.corrections]
        self.clip = Clip(self.section.clip_low, self.section.clip_high, self.section.dual_clip)
        self.clip_of_batch = getattr(self.policy_loss, "clip_of_batch", None)
        over_the_batch = [getattr(correction, "over_the_batch", False) for correction in self.corrections]
        steps = self.learner.minibatches * self.learner.epochs
        self.estimator = ADVANTAGES.find(self.section.advantage)
        self.needs_values = getattr(self.estimator, "needs_values", False)
        """advantages are those of a critic's values, and known once the step has begun"""
        self.needs_norms = getattr(self.estimator, "needs_norms", False)
        """advantages go by the gradient of each response, and are known once the step has begun"""
        self.penalises_rewards = self.needs_values and config.critic.kl_coef > 0
        self.needs_batch = bool(self.clip_of_batch) or any(over_the_batch) or steps > 1 or self.penalises_rewards
        """something is taken from all tokens of a batch before the first of them is trained"""
        self.step_scale = STEP_SCALES.find(self.section.step_scale) if self.section.step_scale else lambda figures: 1.0
        """of a step's figures: what its learning rate is multiplied by"""
        self.needs_reference = self.section.kl_coef > 0
        """in the loss"""
        self.trains_every_sample = self.needs_values or self.needs_reference or self.section.entropy_coef > 0
        """samples with advantage 0 have no gradient otherwise, and are left out"""

    def prepare(self, batch: Batch) -> Prepared:
        groups = [sessions(group) for group in batch.groups]
        rewards, samples = rewards_of(groups), batch.samples
        of_batch = self.first_advantages(groups)
        of_session = np.array(
            [length for group in groups for rows in group for length in [tokens_of(rows)] * len(rows)]
        )
        places = [
            place
            for place, sample in enumerate(samples)
            if sample.sampled_tokens and (of_batch[place] or self.trains_every_sample)
        ]
        trained = [samples[place] for place in places]
        group_of = [number for number, group in enumerate(batch.groups) for _ in group]
        every = [rows for group in groups for rows in group]
        chance = random.Random(f"{self.seed} {batch.step}")
        of_group = np.array(minibatches(len(groups), self.learner.minibatches, chance), np.int64)
        tokens = [sum(map(tokens_of, group)) for group in groups]
        sequences = [sum(tokens_of(rows) > 0 for rows in group) for group in groups]
        minibatch_of = of_group[[group_of[place] for place in places]]
        weights = token_weights(
            self.section.normalisation,
            of_session[places].astype(np.int64),
            np.bincount(of_group, tokens)[minibatch_of],
            np.bincount(of_group, sequences)[minibatch_of],
            self.section.constant_tokens or self.max_response_tokens,
        )
        index_of, numbers = {place: index for index, place in enumerate(places)}, iter(range(len(samples)))
        of_sessions = [[[index_of.get(next(numbers)) for _ in rows] for rows in group] for group in groups]
        kept = [[[index for index in rows if index is not None] for rows in group] for group in of_sessions]
        compared = [list(filter(None, group)) for group, found in zip(kept, rewards, strict=True) if has_spread(found)]
        metrics = {
            "reward": float(np.mean([rows[0].reward for rows in every])) if every else 0.0,
            "samples": float(len(every)),
            "tokens": float(sum(tokens)),
            "groups": float(len(batch.groups)),
            "zero_spread_groups": float(sum(not has_spread(group) for group in rewards)),
            "looping_share": sum(loops(s.tokens[s.prompt_tokens :]) for s in samples) / max(1, len(samples)),
            "gradient_groups": float(len({group_of[place] for place in places})),
            **version_shares(samples),
        }
        divided = minibatch_of.tolist()
        return Prepared(batch.step, trained, of_batch[places], weights, places, divided, of_batch, compared, metrics)

    def first_advantages(self, groups: list[list[Session]]) -> np.ndarray:
        """float64, one a row; where they are known only later, 0 for those that will have none whatever comes."""
        if self.needs_values:
            return np.zeros(sum(len(rows) for group in groups for rows in group))
        if self.needs_norms:
            spread = map(has_spread, rewards_of(groups))
            rows = [sum(map(len, group)) for group in groups]
            return np.repeat(np.fromiter(spread, np.float64, len(groups)), rows)
        return row_advantages(self.section.advantage, groups)

    def compare(self, prepared: Prepared, log_ratios: Tensor, squares: Tensor) -> None:
        """Note in `prepared` the advantages that go by what was measured of each of its compared sessions, [S]."""
        sizes = [len(group) for group in prepared.compared]
        rewards = rewards_of([[[prepared.samples[i] for i in rows] for rows in group] for group in prepared.compared])
        found = self.estimator(rewards, log_ratios.split(sizes), squares.split(sizes))
        for group, advantages_of in zip(prepared.compared, found, strict=True):
            for rows, advantage in zip(group, advantages_of.tolist(), strict=True):
                prepared.advantages[rows] = 0.0 if abs(advantage) < ROUNDING else advantage
        prepared.of_batch[prepared.places] = prepared.advantages

    def tokens(self, prepared: Prepared, indices: list[int], device: torch.device) -> ResponseTokens:
        """The sampled tokens of the prepared samples `indices`, end to end in that order; at least one sample."""
        samples = [prepared.samples[i] for i in indices]
        lengths = np.array([sample.sampled_tokens for sample in samples])

        def column(values: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype)).to(device)

        return ResponseTokens(
            behaviour_logprobs=column(
                np.concatenate([sample.logprobs[sample.sampled] for sample in samples]), np.float32
            ),
            advantages=column(np.repeat(prepared.advantages[indices], lengths), np.float32),
            weights=column(np.repeat(prepared.weights[indices], lengths), np.float32),
            ages=column(np.concatenate([token_ages(sample, prepared.step) for sample in samples]), np.int64),
            spans=Spans(column(np.repeat(np.arange(len(samples)), lengths), np.int64), column(lengths, np.float32)),
            rewards=column(np.array([sample.reward for sample in samples]), np.float32),
        )

    def of_batch(self, scored: Sequence[tuple[ResponseTokens, Tensor]], device: torch.device) -> list[OfBatch]:
        """For each of this rank's micro-batches, of which `scored` has the tokens and their log-probabilities under the
        weights at hand, before the step. Collective, where `needs_batch`."""
        tokens = ResponseTokens.joined([part for part, _ in scored], device)
        logprobs = torch.cat([torch.zeros(0, device=device), *(found for _, found in scored)])
        proximal = self.proximal(logprobs, tokens)
        stale = self.stale(logprobs, proximal, tokens)
        clip = self.clip_of_batch(stale, self.clip, self.section) if self.clip_of_batch else self.clip
        lengths = [len(found) for _, found in scored]
        columns = (column.split(lengths) for column in (proximal, *self.correction(stale)))
        return [OfBatch(clip, *each) for each in zip(*columns, strict=True)] if scored else []

    def loss(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        tokens: ResponseTokens,
        totals: TokenTotals,
        reference_logprobs: Tensor | None = None,
        of_batch: OfBatch | None = None,
    ) -> Tensor:
        """This micro-batch's share of the loss of the global batch; adds its figures to `totals`.

        logprobs, entropies float32 [K] with gradients; `reference_logprobs` where `needs_reference`, `of_batch` where
        `needs_batch`.
        """
        of_batch = of_batch or self.of_batch([(tokens, logprobs.detach())], logprobs.device)[0]
        correction, proximal = of_batch.weight, of_batch.proximal
        token_losses, clipped = self.policy_loss(logprobs, proximal, tokens.advantages, tokens.spans, of_batch.clip)
        token_losses = correction * token_losses
        if self.section.behaviour_coef:
            pull = k2(logprobs, tokens.behaviour_logprobs) * (tokens.advantages != 0)
            token_losses = token_losses + self.section.behaviour_coef * pull
        columns = {}
        if self.needs_reference:
            divergence = KL_ESTIMATORS[self.section.kl_estimator](logprobs, reference_logprobs)
            token_losses = token_losses + self.section.kl_coef * divergence
            columns["reference_kl"] = divergence
        if self.section.entropy_coef:
            token_losses = token_losses - self.section.entropy_coef * entropies
        loss = (tokens.weights * token_losses).sum()
        current, behaviour = logprobs.detach(), tokens.behaviour_logprobs
        totals.add(
            loss,
            tokens.ages,
            log_ratio(current, behaviour).exp(),
            correction,
            entropy=entropies,
            k1=k1(behaviour, current),
            k3=k3(behaviour, current),
            clip_fraction=clipped,
            mask_fraction=correction == 0,
            truncated_fraction=of_batch.truncated,
            **columns,
        )
        totals.add_sequences(bounded(tokens.spans.totals(log_ratio(current, behaviour))).exp())
        return loss

    def proximal(self, logprobs: Tensor, tokens: ResponseTokens) -> Tensor:
        """log-probabilities of the policy around which the loss clips, by those of the weights before the first
        optimizer step; [K], no gradient."""
        if self.section.proximal == "behaviour":
            return tokens.behaviour_logprobs
        if self.section.proximal == "recomputed":
            return logprobs.detach()
        return interpolated_proximal(logprobs, tokens.behaviour_logprobs, tokens.ages)

    def stale(self, current: Tensor, proximal: Tensor, tokens: ResponseTokens) -> StaleTokens:
        """What corrections see; `current` without a gradient."""
        return StaleTokens(
            logprobs=current,
            proximal_logprobs=proximal,
            behaviour_logprobs=tokens.behaviour_logprobs,
            advantages=tokens.advantages,
            ages=tokens.ages,
            spans=tokens.spans,
            ranks=self.ranks,
        )

    def correction(self, stale: StaleTokens) -> tuple[Tensor, Tensor]:
        """What each token's policy loss is multiplied by, float32 [K], and where a cap has made that less, bool [K];
        no gradient."""
        weight, truncated = torch.ones_like(stale.logprobs), torch.zeros_like(stale.logprobs, dtype=torch.bool)
        for correction in self.corrections:
            found = correction(stale, self.section)
            weights, touched = found if isinstance(found, tuple) else (found, truncated)
            weight, truncated = weight * weights, truncated | touched
        return weight, truncated


def tokens_of(session: Session) -> int:
    """That the policy has sampled in it."""
    return sum(row.sampled_tokens for row in session)


def rewards_of(groups: list[list[Session]]) -> list[Tensor]:
    """float64, one a session."""
    return [torch.tensor([rows[0].reward for rows in group], dtype=torch.float64) for group in groups]


def row_advantages(estimator: str, groups: list[list[Session]]) -> np.ndarray:
    """float64, one a row: that of its session among the sessions of its group."""
    lengths = [torch.tensor(list(map(tokens_of, group)), dtype=torch.float64) for group in groups]
    of_groups = advantages(estimator, rewards_of(groups), lengths)
    rows = [torch.tensor(list(map(len, group)), dtype=torch.int64) for group in groups]
    return np.concatenate(
        [np.zeros(0), *(found.repeat_interleave(each).numpy() for found, each in zip(of_groups, rows, strict=True))]
    )


def token_ages(sample: TrainSample, step: int) -> np.ndarray:
    """int64 [K]: steps between the version that sampled each sampled token and weights `step`."""
    ages = [np.full(end - start, step - version.step, np.int64) for start, end, version in sample.segments]
    return np.concatenate(ages)


def version_shares(samples: list[TrainSample]) -> dict[str, float]:
    """The share of a batch's sampled tokens that each policy version has sampled, as `version_share_STEP`.

    Versions before the newest MAX_VERSIONS share `version_share_older`.
    """
    tokens: Counter[int] = Counter()
    for sample in samples:
        for start, end, version in sample.segments:
            tokens[version.step] += end - start
    shares: defaultdict[str, float] = defaultdict(float)
    for place, step in enumerate(sorted(tokens, reverse=True)):
        shares[f"version_share_{step if place < MAX_VERSIONS else 'older'}"] += tokens[step] / tokens.total()
    return dict(shares)
