"""What a step minimises: from a batch to the samples that are trained, and from their log-probabilities to the loss.

`Objective.prepare` reads the whole batch once, the same on every rank; `Objective.loss` is called for each
micro-batch, whose shares add up to the loss of the global batch:

    sum over tokens of weight * (correction * policy loss + behaviour_coef * (log pi - log behaviour)^2 / 2
                                 + kl_coef * KL(pi || reference) - entropy_coef * entropy)

where tokens without an advantage have no pull towards their behaviour policy, so that they need not be computed;
with one optimizer step a batch, so that pi at hand is also the policy at the start of the step.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from april.config import Config
from april.config.checks import check_algorithm
from april.learner.batch import Batch, TrainSample
from april.learner.diagnostics import TokenTotals
from april.learner.losses import CORRECTIONS, LOSSES
from april.learner.losses.advantages import advantages, has_spread
from april.learner.losses.columns import Spans, log_ratio
from april.learner.losses.corrections import StaleTokens, interpolated_proximal
from april.learner.losses.divergence import KL_ESTIMATORS, k1, k2, k3
from april.learner.losses.normalisation import token_weights
from april.learner.losses.policy import Clip

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
    of_batch: np.ndarray
    """float64, the advantage of every sample of the batch"""
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


class Objective:
    """`section` is the configuration's `[algorithm]`."""

    def __init__(self, config: Config):
        """Raises ConfigError for a loss or correction that cannot be found."""
        self.section = config.algorithm
        self.max_response_tokens = config.sampling.max_response_tokens
        check_algorithm(self.section)
        self.policy_loss = LOSSES.find(self.section.loss)
        self.corrections = [CORRECTIONS.find(name) for name in self.section.corrections]
        self.clip = Clip(self.section.clip_low, self.section.clip_high, self.section.dual_clip)
        self.needs_reference = self.section.kl_coef > 0
        self.trains_every_sample = self.needs_reference or self.section.entropy_coef > 0
        """samples with advantage 0 have no gradient otherwise, and are left out"""

    def prepare(self, batch: Batch) -> Prepared:
        rewards = [torch.tensor([s.reward for s in group], dtype=torch.float64) for group in batch.groups]
        lengths = [torch.tensor([s.sampled_tokens for s in group], dtype=torch.float64) for group in batch.groups]
        of_groups = advantages(self.section.advantage, rewards, lengths)
        samples, of_batch = batch.samples, np.concatenate([np.zeros(0), *(of_group.numpy() for of_group in of_groups)])
        places = [
            place
            for place, sample in enumerate(samples)
            if sample.sampled_tokens and (of_batch[place] or self.trains_every_sample)
        ]
        trained = [samples[place] for place in places]
        group_of = [number for number, group in enumerate(batch.groups) for _ in group]
        tokens, sequences = sum(s.sampled_tokens for s in samples), sum(s.sampled_tokens > 0 for s in samples)
        weights = token_weights(
            self.section.normalisation,
            np.array([sample.sampled_tokens for sample in trained], np.int64),
            max(1, tokens),
            max(1, sequences),
            self.section.constant_tokens or self.max_response_tokens,
        )
        metrics = {
            "reward": float(np.mean([sample.reward for sample in samples])) if samples else 0.0,
            "samples": float(len(samples)),
            "tokens": float(tokens),
            "groups": float(len(batch.groups)),
            "zero_spread_groups": float(sum(not has_spread(group) for group in rewards)),
            "gradient_groups": float(len({group_of[place] for place in places})),
            **version_shares(samples),
        }
        return Prepared(batch.step, trained, of_batch[places], weights, places, of_batch, metrics)

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
        )

    def loss(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        tokens: ResponseTokens,
        totals: TokenTotals,
        reference_logprobs: Tensor | None = None,
    ) -> Tensor:
        """This micro-batch's share of the loss of the global batch; adds its figures to `totals`.

        logprobs, entropies float32 [K] with gradients; `reference_logprobs` where `needs_reference`.
        """
        proximal = self.proximal(logprobs, tokens)
        correction, truncated = self.correction(logprobs.detach(), proximal, tokens)
        token_losses, clipped = self.policy_loss(logprobs, proximal, tokens.advantages, tokens.spans, self.clip)
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
            truncated_fraction=truncated,
            **columns,
        )
        return loss

    def proximal(self, logprobs: Tensor, tokens: ResponseTokens) -> Tensor:
        """log-probabilities of the policy around which the loss clips; [K], no gradient.

        With one optimizer step a batch, the proximal policy recomputed at the start of the step is the one at hand.
        """
        if self.section.proximal == "behaviour":
            return tokens.behaviour_logprobs
        if self.section.proximal == "recomputed":
            return logprobs.detach()
        return interpolated_proximal(logprobs, tokens.behaviour_logprobs, tokens.ages)

    def correction(self, current: Tensor, proximal: Tensor, tokens: ResponseTokens) -> tuple[Tensor, Tensor]:
        """What each token's policy loss is multiplied by, float32 [K], and where a cap has made that less, bool [K];
        no gradient."""
        weight, truncated = torch.ones_like(current), torch.zeros_like(current, dtype=torch.bool)
        stale = StaleTokens(
            from_behaviour=log_ratio(proximal, tokens.behaviour_logprobs),
            whole=log_ratio(current, tokens.behaviour_logprobs),
            ages=tokens.ages,
            spans=tokens.spans,
        )
        for correction in self.corrections:
            found = correction(stale, self.section)
            weights, touched = found if isinstance(found, tuple) else (found, truncated)
            weight, truncated = weight * weights, truncated | touched
        return weight, truncated


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
