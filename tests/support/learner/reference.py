"""One learner step in plain PyTorch: one process, no packing, no sharding, no micro-batches, nothing left out.

The learner is tested against this module, which shares no code with it. Read it from `step` on: rewards become
advantages, each response gets its loss token by token, and one AdamW step follows, or one for each minibatch.
Log-ratios are clamped to ±20, those of tokens as well as their sums over a response (`log_ratio`, `bounded`).
"""

import copy
import math
import statistics
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Settings:
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    temperature: float
    max_response_tokens: int
    advantage: str
    loss: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    normalisation: str
    constant_tokens: int | None
    kl_coef: float
    kl_estimator: str
    entropy_coef: float
    behaviour_coef: float
    proximal: str
    corrections: tuple[str, ...]
    truncation: float
    sequence_truncation: float
    icepop_low: float
    icepop_high: float
    geometric_low: float
    geometric_high: float
    vespo_k_positive: float
    vespo_lambda_positive: float
    vespo_k_negative: float
    vespo_lambda_negative: float
    m2po_threshold: float
    dppo_rise: float
    dppo_fall: float
    bapo_target: float
    bapo_lower: float
    bapo_lower_step: float
    bapo_upper: float
    bapo_upper_step: float
    step_scale: str


@dataclass
class StepResult:
    loss: float
    gradients: dict[str, torch.Tensor]
    """Gradients by parameter name, before clipping."""
    grad_norm: float
    summed: float
    """Sum of the absolute loss terms, to which rounding errors are relative."""
    means: dict[str, float] = field(default_factory=dict)
    """Metrics over the tokens that have a gradient."""


@dataclass
class Delivered:
    """Advantages and log-probabilities of all samples of a batch under the weights before the first optimizer step."""

    advantages: list[float]
    logprobs: list[torch.Tensor]


@dataclass
class Scored:
    """Log-probabilities and entropies of a response's K sampled tokens under the current weights: [K] each, with
    gradients."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


class ReferenceLearner:
    def __init__(self, folder, settings: Settings, padded: bool = False):
        """`padded`: all sequences in one forward pass, padded on the right, instead of one after the other."""
        self.settings, self.padded = settings, padded
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain)
        self.start = copy.deepcopy(self.lm).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def step(self, groups, step: int = 0, minibatches=None, epochs: int = 1) -> StepResult:
        """Train the weights of policy step `step` into those of `step` + 1; `groups` are lists of samples as in the
        learner.

        `minibatches`: indices of the groups of each optimizer step. Returns the result of the last optimizer step.
        """
        delivered = self.deliver(groups, step)
        for _ in range(epochs):
            for places in minibatches or [range(len(groups))]:
                result = self.gradients(groups, step, delivered, places)
                if result.means:
                    torch.nn.utils.clip_grad_norm_(self.lm.parameters(), self.settings.grad_clip)
                    share = result.means["sequence_ess"] ** 0.5 if self.settings.step_scale == "root_ess" else 1.0
                    self.optimizer.param_groups[0]["lr"] = self.settings.lr * share
                    self.optimizer.step()
        return result

    def deliver(self, groups, step: int) -> Delivered:
        samples = [sample for group in groups for sample in group]
        with torch.no_grad():
            logprobs = [scored.logprobs for scored in self.score(self.lm, samples)]
        advantages = self.advantages(groups)
        self.look_at_the_batch(samples, step, advantages, logprobs)
        return Delivered(advantages, logprobs)

    def gradients(self, groups, step: int = 0, delivered: Delivered | None = None, places=None) -> StepResult:
        """Loss, gradients and metrics of the groups with the indices `places`; None: of all groups."""
        self.optimizer.zero_grad()
        delivered = delivered or self.deliver(groups, step)
        of_group = [place for place, group in enumerate(groups) for _ in group]
        chosen = [i for i, place in enumerate(of_group) if places is None or place in places]
        every = [sample for group in groups for sample in group]
        samples = [every[i] for i in chosen]
        now, reference = self.score(self.lm, samples), self.score(self.start, samples)
        total, summed, figures = torch.zeros(()), 0.0, []
        for i, place in enumerate(chosen):
            if not sampled(samples[i]):
                continue
            advantage, before = delivered.advantages[place], delivered.logprobs[place]
            losses, seen = self.token_losses(samples[i], step, advantage, now[i], before, reference[i].logprobs)
            total = total + self.share(losses, samples)
            summed += self.share(losses.detach().abs(), samples).item()
            if torch.as_tensor(advantage).any() or self.settings.kl_coef or self.settings.entropy_coef:
                figures.append(seen)
        total.backward()
        gradients = {name: p.grad.clone() for name, p in self.lm.named_parameters() if p.requires_grad}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        return StepResult(total.item(), gradients, norm, summed, means(figures))

    # --- from rewards to advantages -----------------------------------------------------------------------------

    def advantages(self, groups) -> list[float]:
        """Advantages, one per sample, group by group; rounding errors are set to 0."""
        return [0.0 if abs(advantage) < 1e-9 else advantage for advantage in self.estimated(groups)]

    def estimated(self, groups) -> list[float]:
        rewards = [[sample.reward for sample in group] for group in groups]
        name = self.settings.advantage
        if name == "grpo":
            return [a for group in rewards for a in standardised(group)]
        if name == "rloo":
            return [
                r - statistics.mean(group[:i] + group[i + 1 :]) if differ(group) else 0.0
                for group in rewards
                for i, r in enumerate(group)
            ]
        if name == "opob":
            return [a for group in groups for a in self.less_optimal_baseline(group)]
        if name != "reinforce_pp":
            rewards = [[r - statistics.mean(group) if differ(group) else 0.0 for r in group] for group in rewards]
        flat = [r for group in rewards for r in group]
        if name == "dr_grpo":
            return flat
        lengths = [len(sampled(sample)) for group in groups for sample in group]
        by_token = [r for r, length in zip(flat, lengths, strict=True) for _ in range(length)]
        if not differ(by_token):
            return [0.0] * len(flat)
        mean, deviation = statistics.mean(by_token), statistics.stdev(by_token)
        return [(r - mean) / deviation for r in flat]

    def less_optimal_baseline(self, group) -> list[float]:
        """Advantages of a group with VCPO's baseline (OPOB): A = r - b, where b averages rewards with the weight (ratio
        pi / mu * gradient norm)^2 of each response."""
        if not differ([sample.reward for sample in group]):
            return [0.0] * len(group)
        counts = []
        for sample in group:
            logprobs = self.sample_logprobs(sample)
            gradients = torch.autograd.grad(logprobs.sum(), list(self.lm.parameters()))
            square = sum((gradient.double() ** 2).sum().item() for gradient in gradients)
            gap = log_ratio(logprobs.detach(), torch.tensor(sample.logprobs)[sampled(sample)])
            counts.append(bounded(gap.double().sum()).exp().item() ** 2 * square)
        baseline = sum(c * sample.reward for c, sample in zip(counts, group, strict=True)) / sum(counts)
        return [sample.reward - baseline for sample in group]

    # --- what is decided for the whole batch ------------------------------------------------------------------------

    def look_at_the_batch(self, samples, step, advantages, before) -> None:
        """Compute what depends on the whole batch: the largest squared log-ratio that M2PO keeps, and BAPO's clip
        bounds of the ratio."""
        s, moved, contributions = self.settings, [], []
        for sample, advantage, logprobs in zip(samples, advantages, before, strict=True):
            if torch.as_tensor(advantage).any() and sampled(sample):
                mu, proximal = self.policies(sample, step, logprobs)
                moved += log_ratio(logprobs, mu).double().square().tolist()
                ratios = log_ratio(logprobs, proximal).double().exp().tolist()
                contributions += zip(ratios, torch.as_tensor(advantage).expand(len(ratios)).tolist(), strict=True)
        moved.sort()
        while moved and statistics.mean(moved) >= s.m2po_threshold:
            moved.pop()
        self.farthest = moved[-1] if moved else -1.0
        lower, upper = 1 - s.clip_low, 1 + s.clip_high

        def balanced() -> bool:
            good = sum(min(ratio, upper) * advantage for ratio, advantage in contributions if advantage > 0)
            bad = sum(max(ratio, lower) * -advantage for ratio, advantage in contributions if advantage < 0)
            return good >= s.bapo_target * bad

        if s.loss == "bapo":
            while lower < s.bapo_lower and not balanced():
                lower = min(lower + s.bapo_lower_step, s.bapo_lower)
            while upper < s.bapo_upper and not balanced():
                upper = min(upper + s.bapo_upper_step, s.bapo_upper)
        self.bounds = lower, upper

    # --- one response -------------------------------------------------------------------------------------------

    def token_losses(self, sample, step, advantage, now: Scored, before, reference) -> tuple[torch.Tensor, dict]:
        """Loss of each of a response's K sampled tokens, [K], and metrics of each token."""
        s, logprobs = self.settings, now.logprobs
        fixed, ages = logprobs.detach(), ages_of(sample, step)
        mu, proximal = self.policies(sample, step, before)
        weight, capped = self.correction(proximal, before, mu, ages, advantage)
        losses, clipped = self.policy_loss(logprobs, proximal, advantage)
        losses = weight * losses + s.behaviour_coef * log_ratio(logprobs, mu) ** 2 / 2 * (advantage != 0)
        if s.kl_coef:
            gap = log_ratio(logprobs, reference)
            estimate = {"k1": gap, "k2": gap**2 / 2, "k3": (torch.exp(-gap) - 1 + gap).clamp(max=10.0)}
            losses = losses + s.kl_coef * estimate[s.kl_estimator]
        losses = losses - s.entropy_coef * now.entropies
        gap = log_ratio(fixed, mu)
        figures = {
            "entropy": now.entropies.detach(), "k1": -gap, "k3": (gap.exp() - 1 - gap).clamp(max=10.0),
            "clip_fraction": clipped.float(), "mask_fraction": (weight == 0).float(),
            "truncated_fraction": capped.float(), "ratio_mean": gap.exp(), "weight_mean": weight,
            "off_policy_share": (ages > 0).float(), "sequence_ratio": bounded(gap.sum()).exp()[None],
        }  # fmt: skip
        return losses, figures

    def policies(self, sample, step, before) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [K] of the sampled tokens under the behaviour policy, and under the proximal policy."""
        mu, ages = torch.tensor(sample.logprobs)[sampled(sample)], ages_of(sample, step)
        choices = {"behaviour": mu, "recomputed": before, "interpolated": self.one_version_before(before, mu, ages)}
        return mu, choices[self.settings.proximal]

    def one_version_before(self, current, mu, ages):
        prior = [m if a < 2 else m + (a - 1) / a * (c - m) for c, m, a in zip(current, mu, ages.tolist(), strict=True)]
        return torch.stack(prior)

    def correction(self, proximal, before, mu, ages, advantage) -> tuple[torch.Tensor, torch.Tensor]:
        """Correction weights [K] of the sampled tokens, and the tokens at which a weight is capped."""
        s, weight, capped = self.settings, torch.ones_like(mu), torch.zeros_like(mu)
        proximal_gap, whole_gap = log_ratio(proximal, mu), log_ratio(before, mu)
        ratio, product = proximal_gap.exp(), bounded(proximal_gap.sum()).exp()
        if "truncated" in s.corrections:
            weight, capped = weight * ratio.clamp(max=s.truncation), ratio > s.truncation
        if "truncated_sequence" in s.corrections:
            weight = weight * product.clamp(max=s.sequence_truncation)
            capped = (product > s.sequence_truncation).expand(len(ratio))
        if "icepop" in s.corrections:
            weight = weight * ratio * (s.icepop_low <= ratio) * (ratio <= s.icepop_high)
        if "geometric" in s.corrections:
            weight = weight * float(s.geometric_low <= whole_gap.mean().exp() <= s.geometric_high)
        if "on_policy_only" in s.corrections:
            weight = weight * (ages == 0)
        if "vespo" in s.corrections:
            good = advantage >= 0
            k = s.vespo_k_positive if good else s.vespo_k_negative
            decay = s.vespo_lambda_positive if good else s.vespo_lambda_negative
            weight = weight * math.exp(decay) * product**k * torch.exp(-decay * product)
        if "m2po" in s.corrections and advantage:
            weight = weight * (whole_gap.double() ** 2 <= self.farthest)
        if "dppo_tv" in s.corrections:
            risen = before.exp() - mu.exp()
            weight = weight * ((risen <= s.dppo_rise) if advantage > 0 else (risen >= -s.dppo_fall))
        return weight, capped

    def policy_loss(self, logprobs, proximal, advantage: float) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.settings
        low, high = self.bounds
        ratio = log_ratio(logprobs, proximal).exp()
        if s.loss == "cispo":
            weight = ratio.detach().clamp(low, high)
            return -weight * advantage * logprobs, weight != ratio
        if s.loss in ("gspo", "gspo_token"):
            ratio = bounded((logprobs - proximal).mean()).exp().expand(len(logprobs))
        if s.loss == "gspo_token":
            ratio = ratio.detach() * logprobs.exp() / logprobs.exp().detach()
        plain, clamped = -ratio * advantage, -ratio.clamp(low, high) * advantage
        losses, clipped = torch.maximum(plain, clamped), clamped > plain
        if s.loss in ("ppo", "bapo") and s.dual_clip is not None and advantage < 0:
            ceiling = torch.full_like(losses, -s.dual_clip * advantage)
            losses, clipped = torch.minimum(losses, ceiling), clipped | (losses > ceiling)
        return losses, clipped

    def share(self, losses, samples) -> torch.Tensor:
        """Contribution of one response's token losses to the loss of the batch."""
        lengths = [len(sampled(sample)) for sample in samples]
        responses = sum(length > 0 for length in lengths)
        if self.settings.normalisation == "token_mean":
            return losses.sum() / sum(lengths)
        if self.settings.normalisation == "sequence_mean":
            return losses.mean() / responses
        return losses.sum() / (self.settings.constant_tokens or self.settings.max_response_tokens) / responses

    # --- the model ----------------------------------------------------------------------------------------------

    def score(self, lm, samples) -> list[Scored]:
        if not self.padded:
            logits = [lm(torch.tensor(sample.tokens[None].astype("int64"))).logits[0] for sample in samples]
        else:
            ids = torch.zeros(len(samples), max(len(sample.tokens) for sample in samples), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, sample in enumerate(samples):
                ids[row, : len(sample.tokens)] = torch.tensor(sample.tokens.astype("int64"))
                mask[row, : len(sample.tokens)] = 1
            logits = lm(ids, attention_mask=mask).logits
        return [self.of_response(rows, sample) for rows, sample in zip(logits, samples, strict=True)]

    def of_response(self, logits, sample) -> Scored:
        first, last = sample.prompt_tokens, len(sample.tokens)
        logits, drawable = (
            logits[first - 1 : last - 1] / self.settings.temperature,
            self.drawable(sample, logits.shape[-1]),
        )
        distribution = torch.log_softmax(logits.masked_fill(~drawable, -torch.inf), dim=-1)
        response = torch.tensor(sample.tokens[first:].astype("int64"))
        chosen, places = distribution[torch.arange(len(response)), response], sampled(sample)
        surprise = -distribution.masked_fill(~drawable, 0)
        return Scored(chosen[places], (distribution.exp() * surprise).sum(-1)[places])

    def drawable(self, sample, vocabulary: int) -> torch.Tensor:
        """bool [R, V]: for each response token, the ids that it could be sampled from (its support); all ids if
        sampling was not truncated."""
        response = len(sample.tokens) - sample.prompt_tokens
        drawable, at = torch.ones(response, vocabulary, dtype=torch.bool), 0
        for place, count in enumerate(sample.support.counts.tolist() if sample.support else []):
            if count:
                drawable[place] = False
                drawable[place, torch.tensor(sample.support.ids[at : at + count].astype("int64"))] = True
            at += count
        return drawable

    def sample_logprobs(self, sample) -> torch.Tensor:
        """Log-probability of each sampled token, [K]."""
        return self.score(self.lm, [sample])[0].logprobs


def log_ratio(logprobs, others) -> torch.Tensor:
    """Log-ratio [K], clamped so that a token's ratio is at most 5e8."""
    return bounded(logprobs - others)


def bounded(log_ratios) -> torch.Tensor:
    return log_ratios.clamp(-20, 20)


def sampled_under(sample) -> list[tuple[int, object]]:
    """(position in the response, version) of each token that the policy sampled; other tokens are observations."""
    return [(place, version) for start, end, version in sample.segments for place in range(start, end)]


def ages_of(sample, step: int) -> torch.Tensor:
    """Ages of the sampled tokens, [K]: policy steps since the version that sampled them."""
    return torch.tensor([float(step - version.step) for _, version in sampled_under(sample)])


def sampled(sample) -> list[int]:
    return [place for place, _ in sampled_under(sample)]


def differ(rewards: list[float]) -> bool:
    return len(rewards) > 0 and max(rewards) - min(rewards) > 1e-6


def standardised(rewards: list[float]) -> list[float]:
    """(r - mean) / sample standard deviation; zeros for a group without reward spread."""
    if not differ(rewards):
        return [0.0] * len(rewards)
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / deviation for reward in rewards]


def means(figures: list[dict]) -> dict[str, float]:
    if not figures:
        return {}
    columns = {name: torch.cat([seen[name] for seen in figures]).double() for name in figures[0]}
    sequences = columns.pop("sequence_ratio")
    result = {name: column.mean().item() for name, column in columns.items()}
    effective = {"ess": columns["ratio_mean"], "weight_ess": columns["weight_mean"], "sequence_ess": sequences}
    for name, column in effective.items():
        result[name] = (column.sum() ** 2 / (len(column) * (column**2).sum())).item()
    return result
