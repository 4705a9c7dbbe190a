"""The critic: a second copy of the policy's body, with a linear head that predicts the remaining reward.

    values = critic.scores(micros)                  # of each micro-batch, under the weights at delivery
    tokens, metrics = critic.estimate(tokens)       # with advantages and returns, fixed for the whole batch
    critic.backward(micro.packed, tokens)           # for each micro-batch of an optimizer step
    metrics = critic.finish_step()
    critic.update()

It is sharded, checkpointed and packed like the policy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from april.config import Config
from april.learner import attention
from april.learner.backends.backend import Backend, clip_gradients
from april.learner.checkpoint import CheckpointPart
from april.learner.frozen_base import in_bf16
from april.learner.loading import empty_model, hold_inputs_on_host
from april.learner.losses.kl import k1
from april.learner.losses.ranks import Ranks
from april.learner.model import hidden_states, load_sharded
from april.learner.objective import Objective, ResponseTokens
from april.learner.packing import MicroBatch
from april.learner.turns import turns_in_range
from april.learner.vision import freeze_tower
from april.util.pulse import MAIN

Estimator = Callable[..., Tensor]
"""Function (rewards [K], values [K], spans, configuration section `[critic]`) -> advantages [K], such as
`april.learner.losses.gae.gae`."""
VARIANCE = 1e-8
"""Constant added to the variance of the advantages before the square root in whitening, as in TRL and verl."""


class ValueModel(nn.Module):
    """The body `lm` of a causal LM, and a linear value head initialised to 0."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.head = nn.Parameter(torch.zeros(lm.config.get_text_config().hidden_size))

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def forward(self, micro: MicroBatch) -> Tensor:
        """Value of the state before each target of `micro`, float32 [K]."""
        return hidden_states(self.lm, micro).float() @ self.head.float()


def empty_value_model(folder: Path, recompute: bool = False) -> ValueModel:
    """The value model of a Hugging Face folder with parameters on the meta device; `april.learner.model.empty_policy`
    has already checked the folder's model. `recompute`: the backward pass recomputes a layer's activations instead of
    keeping them."""
    return ValueModel(empty_model(folder, attention.register(), body_alone=True, recompute=recompute)).train()


class Critic:
    """The sharded value model and its optimizer. Every method is collective except `advantages` and `update`."""

    def __init__(self, config: Config, device: torch.device, bf16: bool, objective: Objective, backend: Backend):
        """`bf16`: passes in bfloat16, otherwise in float32. `objective`: one that takes the critic's values. `backend`:
        that of the policy; the critic gets the same micro-batches."""
        self.section, self.device, self.ranks = config.critic, device, backend.ranks
        self.estimator: Estimator = objective.estimator
        model = empty_value_model(config.model.path, config.learner.activation_checkpointing)
        if config.learner.activations_on_host:
            hold_inputs_on_host(model.lm, pinned=device.type == "cuda")
        if config.learner.freeze_vision:
            freeze_tower(model.lm)
        if config.learner.master_weights == "bf16":
            in_bf16(model.parameters())
        self.turn_discount = objective.section.turn_discount
        self.model = backend.divide(load_sharded(model, config.model.path, device, bf16))
        self.part = CheckpointPart.of("critic.", self.model, config.critic.lr, config.learner)
        self._totals = self._blank()
        self._has_gradient = False
        """Whether the optimizer step that `finish_step` ended last had tokens with a value loss, on any rank; otherwise
        `update` changes nothing."""

    def _blank(self) -> Tensor:
        """Zero-initialised sums of an optimizer step: [tokens, loss, clipped tokens]."""
        return torch.zeros(3, dtype=torch.float64, device=self.device)

    def scores(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[Tensor]]:
        """Values [K] of each micro-batch, without gradients."""
        for micro in micros:
            MAIN.again()
            with torch.no_grad():
                values = self.model(micro)
            yield (values,)

    def estimate(self, tokens: Sequence[ResponseTokens | None]) -> tuple[list[ResponseTokens | None], dict[str, float]]:
        """Advantages and value targets of the whole batch. `tokens`: those of each of this rank's micro-batches, whose
        scores have the critic's values; None for a dummy micro-batch. Returns (copies of `tokens`, metrics over all
        ranks). The copies have the advantages A for the policy loss, whitened if `critic.whiten`, and the score
        `returns`: the targets A + V of the value loss, with A not whitened."""
        known = [part for part in tokens if part is not None]
        raw = [self.advantages(part) for part in known]
        blank, lengths = torch.zeros(0, device=self.device), [len(each) for each in raw]
        joined, values = torch.cat([blank, *raw]), torch.cat([blank, *(part.scores["values"] for part in known)])
        returns = joined + values
        advantages = whitened(joined, self.ranks) if self.section.whiten else joined
        estimates = zip(known, advantages.split(lengths), returns.split(lengths), strict=True)
        found = iter(
            [replace(part, advantages=each, scores={**part.scores, "returns": back}) for part, each, back in estimates]
        )
        return [None if part is None else next(found) for part in tokens], value_metrics(values, returns, self.ranks)

    def advantages(self, tokens: ResponseTokens) -> Tensor:
        """Advantages [K], not whitened. The reward comes with the last token of a response, that of a turn with the
        turn's last token; with `critic.kl_coef` each token's KL to the reference model is subtracted from it.

        With rewards of turns, the discount after the last token of a turn is `critic.gamma` times
        `algorithm.turn_discount`. The estimator knows `critic.gamma` alone, so it gets rewards and values multiplied by
        a scale, turn_discount^(turn's number), and its advantages are divided by the scale; that is exact for an
        estimator that is linear and looks at later tokens alone. One call covers at most `turns_in_range` turns, and
        scales are relative to the first of them, so that no scale is too small to divide by.
        """
        scores, last = tokens.scores, tokens.spans.lengths.long().cumsum(0) - 1
        rewards = torch.zeros_like(scores["values"]).index_put_((last,), tokens.rewards)
        if self.section.kl_coef:
            rewards = rewards - self.section.kl_coef * k1(scores["initial_logprobs"], scores["reference_logprobs"])
        if "turn_rewards" not in scores:
            return self.estimator(rewards, scores["values"], tokens.spans, self.section)
        turns, count = scores["turns"], turns_in_range(self.turn_discount)
        rewards, values = rewards + scores["turn_rewards"], scores["values"]
        found = torch.zeros_like(turns)
        for first in range(0, int(turns.max()) + 1, count):
            scale = (self.turn_discount ** (turns - first)).where(turns >= first, 0.0)
            scaled = self.estimator(rewards * scale, values * scale, tokens.spans, self.section) / scale
            found = scaled.where((turns >= first) & (turns < first + count), found)
        return found.to(values.dtype)

    def backward(self, packed: MicroBatch, tokens: ResponseTokens | None) -> None:
        """Accumulate the gradients of the value loss of a micro-batch, `packed`. `tokens`: its tokens, whose scores
        have the old values and the targets; None for a dummy micro-batch, which contributes 0 and only joins
        collectives."""
        values = self.model(packed)
        if tokens is None:
            (0.0 * values.sum()).backward()
            return
        old_values, returns = tokens.scores["values"], tokens.scores["returns"]
        losses, clipped = value_losses(values, old_values, returns, self.section.value_clip)
        loss = (tokens.weights * losses).sum()
        loss.backward()
        self._totals += torch.stack(
            [loss.new_tensor(float(len(losses))), loss.detach(), clipped.float().sum()]
        ).double()

    def finish_step(self) -> dict[str, float]:
        """Clip the accumulated gradients to `critic.grad_clip`; returns the metrics of the optimizer step."""
        tokens, loss, clipped = self.ranks.total(self._totals).tolist()
        self._totals, self._has_gradient = self._blank(), tokens > 0
        norm = clip_gradients(self.model, self.section.grad_clip) if tokens else 0.0
        return {
            "value_loss": loss,
            "value_clip_fraction": clipped / tokens if tokens else 0.0,
            "critic_grad_norm": norm,
        }

    def update(self) -> None:
        if not self._has_gradient:
            return
        self.part.optimizer.step(self.section.lr)
        self.part.steps += 1


def value_metrics(values: Tensor, returns: Tensor, ranks: Ranks) -> dict[str, float]:
    """Mean value and return, and explained variance 1 - Var(R - V) / Var(R), over the tokens of all
    `ranks`. Collective."""
    value, target = values.double(), returns.double()
    error = target - value
    columns = [torch.ones_like(value), value, target, target.square(), error, error.square()]
    tokens, value, target, square, error, error_square = ranks.total(torch.stack([c.sum() for c in columns])).tolist()
    if not tokens:
        return {}
    variance = square / tokens - (target / tokens) ** 2
    residual = error_square / tokens - (error / tokens) ** 2
    return {
        "value_mean": value / tokens,
        "return_mean": target / tokens,
        "explained_variance": 1 - residual / variance if variance > 0 else 0.0,
    }


def whitened(advantages: Tensor, ranks: Ranks) -> Tensor:
    """(A - mean) / sqrt(variance + VARIANCE), over the tokens of all ranks; [K] -> [K], K may be 0. Collective."""
    exact = advantages.double()
    count, total = ranks.total(exact.new_tensor([len(exact), float(exact.sum())]))
    centred = exact - total / count.clamp(min=1)
    variance = ranks.total(centred.square().sum()) / (count - 1).clamp(min=1)
    return (centred * (variance + VARIANCE).rsqrt()).to(advantages.dtype)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Value loss max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token, and bool: whether the
    clip removes its gradient; [K] each. With `clip` = 0: (V - R)^2 / 2.

    The squared error of PPO, arXiv 1707.06347, equation 9, clipped as in the authors' code: "Implementation Matters in
    Deep Policy Gradients", arXiv 2005.12729, section 3.
    """
    error = (values - returns).square()
    if not clip:
        return error / 2, error.new_zeros(len(error), dtype=error.dtype).bool()
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    clipped_error = (clipped_values - returns).square()
    return error.maximum(clipped_error) / 2, clipped_error > error
