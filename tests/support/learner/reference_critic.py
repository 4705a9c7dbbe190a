"""PPO with a critic in plain PyTorch, an extension of `reference.py`: GAE (arXiv 1506.02438) and PPO (arXiv
1707.06347).

The learner is tested against this module, which shares no code with it.
"""

import copy

import torch

from tests.support.learner.reference import Delivered, ReferenceLearner, sampled
from tests.support.learner.small_learner import random_adapter, settings


class CriticReference(ReferenceLearner):
    def __init__(self, folder, config, random_head: bool = False):
        super().__init__(folder, settings(config))
        self.critic, self.body = config.critic, copy.deepcopy(self.lm.model)
        self.head = torch.zeros(self.lm.config.hidden_size)
        if random_head:
            self.head = random_adapter({"head": self.head})["head"]
        self.head.requires_grad_()
        s = self.settings
        self.parameters = dict(self.body.named_parameters(prefix="lm")) | {"head": self.head}
        self.critic_optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=self.critic.lr, betas=s.betas, weight_decay=s.weight_decay
        )

    def step(self, groups, step: int = 0, minibatches=None, epochs: int = 1):
        """One step of the reference, in which each optimizer step of the policy is accompanied by one of the critic."""
        delivered = self.deliver(groups, step)
        for _ in range(epochs):
            for places in minibatches or [range(len(groups))]:
                self.value_gradients(groups, places)
                result = self.gradients(groups, step, delivered, places)
                torch.nn.utils.clip_grad_norm_(self.lm.parameters(), self.settings.grad_clip)
                torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.critic.grad_clip)
                self.optimizer.step()
                self.critic_optimizer.step()
        return result

    def deliver(self, groups, step: int) -> Delivered:
        samples = [sample for group in groups for sample in group]
        with torch.no_grad():
            logprobs = [scored.logprobs for scored in self.score(self.lm, samples)]
            starting = [scored.logprobs for scored in self.score(self.start, samples)]
            self.before = [self.values(sample) for sample in samples]
        raw = []
        for sample, value, logprob, other in zip(samples, self.before, logprobs, starting, strict=True):
            rewards = (-self.critic.kl_coef * (logprob - other)).tolist()
            rewards[-1] += sample.reward
            raw.append(torch.tensor(gae(rewards, value.tolist(), self.critic.gamma, self.critic.lam)))
        self.returns = [advantages + value for advantages, value in zip(raw, self.before, strict=True)]
        everything = torch.cat(raw)
        spread = (everything.var() + 1e-8) ** 0.5
        whitened = [(advantages - everything.mean()) / spread for advantages in raw]
        advantages = whitened if self.critic.whiten else raw
        self.look_at_the_batch(samples, step, advantages, logprobs)
        return Delivered(advantages, logprobs)

    def value_gradients(self, groups, places) -> float:
        """Accumulate the gradients of the critic's loss; returns the loss."""
        self.critic_optimizer.zero_grad()
        of_group = [place for place, group in enumerate(groups) for _ in group]
        chosen = [i for i, place in enumerate(of_group) if place in places]
        every = [sample for group in groups for sample in group]
        total, clip = torch.zeros(()), self.critic.value_clip
        for i in chosen:
            value, old, target = self.values(every[i]), self.before[i], self.returns[i]
            loss = (value - target) ** 2
            if clip:
                loss = torch.maximum(loss, (torch.clamp(value, old - clip, old + clip) - target) ** 2)
            total = total + self.share(loss / 2, [every[j] for j in chosen])
        total.backward()
        return total.item()

    def values(self, sample) -> torch.Tensor:
        """Values of the state before each sampled token, [K]."""
        hidden = self.body(torch.tensor(sample.tokens[None].astype("int64"))).last_hidden_state[0]
        first, last = sample.prompt_tokens, len(sample.tokens)
        return (hidden[first - 1 : last - 1] @ self.head)[sampled(sample)]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16: A_t = sum over l of (gamma lambda)^l delta_(t+l), with delta as in equation 10."""
    after = [*values[1:], 0.0]
    deltas = [reward + gamma * later - value for reward, value, later in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * lam) ** distance * delta for distance, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
