"""One learner step in plain PyTorch: one process, one sequence at a time, nothing packed, sharded or skipped.

The pipeline is tested against this page. It shares no code with it.
"""

import statistics
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Settings:
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    clip_low: float
    clip_high: float
    grad_clip: float
    temperature: float


@dataclass
class StepResult:
    loss: float
    gradients: dict[str, torch.Tensor]
    """before clipping"""
    grad_norm: float
    means: dict[str, float] = field(default_factory=dict)
    """entropy, kl, clip_fraction, ratio_mean over tokens with an advantage"""


class ReferenceLearner:
    def __init__(self, folder, settings: Settings):
        self.settings = settings
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def log_distribution(self, sample) -> torch.Tensor:
        """[R, V]: log-probabilities of every token at every response position, from tempered logits."""
        logits = self.lm(torch.tensor(sample.tokens[None].astype("int64"))).logits[0]
        return torch.log_softmax(logits[sample.prompt_tokens - 1 : -1] / self.settings.temperature, dim=-1)

    def of_response(self, distribution, sample) -> torch.Tensor:
        response = torch.tensor(sample.tokens[sample.prompt_tokens :].astype("int64"))
        return distribution[torch.arange(len(response)), response]

    def sample_logprobs(self, sample) -> torch.Tensor:
        """[R]: log-probability of each response token."""
        return self.of_response(self.log_distribution(sample), sample)

    def step(self, groups) -> StepResult:
        """groups: lists of samples with tokens, prompt_tokens, logprobs and reward. Updates the weights."""
        self.optimizer.zero_grad()
        batch_tokens = sum(len(sample.logprobs) for group in groups for sample in group)
        total, columns = 0.0, {"entropy": [], "kl": [], "clip_fraction": [], "ratio_mean": []}
        for group in groups:
            for sample, advantage in zip(group, advantages([s.reward for s in group]), strict=True):
                loss = self.sample_loss(sample, advantage, columns) / batch_tokens
                loss.backward()
                total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.lm.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        if columns["kl"]:
            torch.nn.utils.clip_grad_norm_(self.lm.parameters(), self.settings.grad_clip)
            self.optimizer.step()
        means = {name: statistics.mean(values) for name, values in columns.items() if values}
        return StepResult(total, gradients, norm, means)

    def sample_loss(self, sample, advantage: float, columns) -> torch.Tensor:
        """Sum over the response of max(-ratio A, -clip(ratio) A); a mean over tokens is taken by the caller."""
        distribution = self.log_distribution(sample)
        logprobs = self.of_response(distribution, sample)
        log_ratio = logprobs - torch.tensor(sample.logprobs)
        ratio = log_ratio.exp()
        bounded = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        plain, clipped = -ratio * advantage, -bounded * advantage
        if advantage:
            columns["entropy"] += (-(distribution.exp() * distribution).sum(-1)).tolist()
            columns["kl"] += (ratio - 1 - log_ratio).tolist()
            columns["clip_fraction"] += (clipped > plain).double().tolist()
            columns["ratio_mean"] += ratio.tolist()
        return torch.maximum(plain, clipped).sum()


def advantages(rewards: list[float]) -> list[float]:
    """(r - mean) / sample standard deviation; zeros for a group that says nothing."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / deviation for reward in rewards]
