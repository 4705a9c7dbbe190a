"""A critic: the policy's own body, trained apart from it, with a head that says what reward is still to come.

    values = [critic.values(micro.packed) for micro in micros]      # under the weights at delivery
    judged, figures = critic.judge(tokens, values, rewards)         # advantages and returns, fixed for the whole batch
    critic.backward(micro.packed, tokens, judged)                   # of each micro-batch of an optimizer step
    figures = critic.reduced()
    critic.update()

Sharded, checkpointed and packed as the policy is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from april.config import Config
from april.learner import attention
from april.learner.checkpoint import Part
from april.learner.gradients import adamw, clip_gradients
from april.learner.loading import empty_model
from april.learner.losses.gae import value_losses, whitened
from april.learner.losses.ranks import Ranks
from april.learner.model import hidden_states, load_sharded
from april.learner.objective import ResponseTokens
from april.learner.packing import MicroBatch

Estimator = Callable[..., Tensor]
"""see `april.learner.losses.gae`"""


class ValueModel(nn.Module):
    """The body `lm` of a causal LM, and a linear head that is 0 at first."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.head = nn.Parameter(torch.zeros(lm.config.hidden_size))

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def forward(self, micro: MicroBatch) -> Tensor:
        """The value of what precedes each target of `micro`, float32 [K]."""
        return hidden_states(self.lm, micro).float() @ self.head.float()


def outline_of_values(folder: Path, recompute: bool = False) -> ValueModel:
    """As `april.learner.model.outline`, whose refusals have been asked before."""
    body = empty_model(folder, attention.register(), body_alone=True)
    if recompute:
        body.gradient_checkpointing_enable({"use_reentrant": False})
    return ValueModel(body).train()


@dataclass(frozen=True, eq=False)
class Judged:
    """Of the K tokens of a micro-batch, before the first optimizer step of its batch."""

    values: Tensor
    """float32 [K]"""
    returns: Tensor
    """float32 [K]: advantages by GAE, not whitened, and values; what the values are drawn to"""
    advantages: Tensor
    """float32 [K]: what the policy is trained by"""


class Critic:
    """Every method is collective, but `advantages` and `update`."""

    def __init__(self, config: Config, device: torch.device, bf16: bool, estimator: Estimator):
        self.section, self.device, self.estimator = config.critic, device, estimator
        outline = outline_of_values(config.model.path, config.learner.activation_checkpointing)
        self.model = load_sharded(outline, config.model.path, device, bf16)
        optimizer = adamw([parameter for _, parameter in self.model.trained], config.critic.lr, config.learner)
        self.part = Part("critic.", self.model, optimizer)
        self._totals = self._blank()

    def _blank(self) -> Tensor:
        """Tokens, loss and clipped tokens of an optimizer step."""
        return torch.zeros(3, dtype=torch.float64, device=self.device)

    def values(self, packed: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self.model(packed)

    def judge(
        self, tokens: Sequence[ResponseTokens | None], values: Sequence[Tensor], penalties: Sequence[Tensor | None]
    ) -> tuple[list[Judged | None], dict[str, float]]:
        """Of this rank's micro-batches, None of a dummy, and figures of those of all. `penalties`: what is taken from
        the reward of each token, [K]."""
        known = [place for place, part in enumerate(tokens) if part is not None]
        columns = zip(tokens, values, penalties, strict=True)
        raw = [self.advantages(part, value, penalty) for part, value, penalty in columns if part is not None]
        blank, lengths = torch.zeros(0, device=self.device), [len(each) for each in raw]
        joined, value = torch.cat([blank, *raw]), torch.cat([blank, *(values[place] for place in known)])
        returns = joined + value
        advantages = whitened(joined, Ranks()) if self.section.whiten else joined
        found: list[Judged | None] = [None] * len(tokens)
        split = (column.split(lengths) for column in (value, returns, advantages))
        for place, each in zip(known, zip(*split, strict=True), strict=True):
            found[place] = Judged(*each)
        return found, figures_of(value, returns)

    def advantages(self, tokens: ResponseTokens, values: Tensor, penalty: Tensor | None) -> Tensor:
        """[K], not whitened: by a reward that comes with the last token of a response, less each token's penalty."""
        last = tokens.spans.lengths.long().cumsum(0) - 1
        rewards = torch.zeros_like(values).index_put_((last,), tokens.rewards)
        return self.estimator(rewards if penalty is None else rewards - penalty, values, tokens.spans, self.section)

    def backward(self, packed: MicroBatch, tokens: ResponseTokens | None, judged: Judged | None) -> None:
        """Add a micro-batch's gradients; a dummy, of which there is nothing to say, takes part and weighs nothing."""
        values = self.model(packed)
        if tokens is None or judged is None:
            (0.0 * values.sum()).backward()
            return
        losses, clipped = value_losses(values, judged.values, judged.returns, self.section.value_clip)
        loss = (tokens.weights * losses).sum()
        loss.backward()
        self._totals += torch.stack(
            [loss.new_tensor(float(len(losses))), loss.detach(), clipped.float().sum()]
        ).double()

    def reduced(self) -> dict[str, float]:
        """Figures of an optimizer step, whose gradients have been added; norm of those, which are clipped."""
        tokens, loss, clipped = Ranks().total(self._totals).tolist()
        self._totals = self._blank()
        norm = clip_gradients(self.model, self.section.grad_clip) if tokens else 0.0
        return {
            "value_loss": loss,
            "value_clip_fraction": clipped / tokens if tokens else 0.0,
            "critic_grad_norm": norm,
        }

    def update(self) -> None:
        self.part.optimizer.step()
        self.part.steps += 1


def figures_of(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Means over the tokens of all ranks, and what share of the returns' variance they explain. Collective."""
    value, found = values.double(), returns.double()
    off = found - value
    columns = [torch.ones_like(value), value, found, found.square(), off, off.square()]
    tokens, value, found, square, off, off_square = Ranks().total(torch.stack([c.sum() for c in columns])).tolist()
    if not tokens:
        return {}
    variance = square / tokens - (found / tokens) ** 2
    left = off_square / tokens - (off / tokens) ** 2
    return {
        "value_mean": value / tokens,
        "return_mean": found / tokens,
        "explained_variance": 1 - left / variance if variance > 0 else 0.0,
    }
