"""Trainer and reference with weights that never change, so that many algorithms can be compared on one model."""

import pytest
import torch

from april.config import Config
from april.learner.algorithms import Algorithms
from april.learner.batch import TrainingBatch
from april.learner.packing import pack
from april.learner.trainer import Trainer
from tests.support.learner.reference import ReferenceLearner, StepResult
from tests.support.learner.small_learner import make_config, settings


class FrozenTrainer(Trainer):
    def __init__(self, policy, folder):
        super().__init__(make_config(policy, folder, algorithm={"kl_coef": 1.0}), torch.device("cpu"))
        move_away(self.reference.lm)

    def update(self, lr):
        pass

    def gradients(self, batch: TrainingBatch, config: Config) -> tuple[dict, dict]:
        """Metrics and unsharded gradients of a step under `config`. Collective."""
        self.config, self.algorithms = config, Algorithms(config)
        metrics = self.step(batch)
        return metrics, full_gradients(self.policy.lm)


class FrozenReference(ReferenceLearner):
    """A reference for one batch that computes forward passes without gradients only once."""

    def __init__(self, policy, folder):
        super().__init__(policy, settings(make_config(policy, folder)), padded=True)
        move_away(self.start)
        self.known = {}

    def score(self, lm, samples):
        if torch.is_grad_enabled() and lm is self.lm:
            return super().score(lm, samples)
        if lm not in self.known:
            self.known[lm] = super().score(lm, samples)
        return self.known[lm]

    def expected(self, batch: TrainingBatch, config: Config) -> StepResult:
        self.settings = settings(config)
        return self.gradients(batch.groups, batch.step)


def move_away(start) -> None:
    """Make the reference policy of the KL term differ from the current policy."""
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.mul_(0.9)


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Unsharded gradients by name. Collective."""
    parameters = model.named_parameters()
    return {name: each.grad.full_tensor().clone() for name, each in parameters if each.grad is not None}


def short(batch: TrainingBatch) -> TrainingBatch:
    """The batch without its longest responses."""
    return TrainingBatch(batch.step, [[s for s in group if s.response_tokens <= 30] for group in batch.groups])


def assert_equals(metrics: dict, gradients: dict, expected: StepResult, tolerance: float = 1e-5) -> None:
    assert metrics["loss"] == pytest.approx(expected.loss, rel=0, abs=tolerance * max(expected.summed, 0.1))
    assert metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=tolerance, abs=1e-7)
    largest = max(value.abs().max().item() for value in expected.gradients.values())
    for name, value in expected.gradients.items():
        off = (gradients[name] - value).abs().max().item()
        assert off <= tolerance * largest, f"{name}: off by {off} where gradients reach {largest}"
    figures = {name: metrics[name] for name in expected.means}
    assert figures == pytest.approx(expected.means, rel=10 * tolerance, abs=1e-5)


def assert_computes_as(reference: ReferenceLearner, policy, samples: list) -> None:
    """The packed policy's log-probabilities and gradients are the reference's, of one sequence at a time."""
    logprobs, _ = policy(pack(samples, torch.device("cpu")))
    expected = torch.cat([reference.sample_logprobs(sample) for sample in samples])
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    theirs = dict(reference.lm.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        scale = theirs[name].grad.abs().max().item()
        assert (parameter.grad.full_tensor() - theirs[name].grad).abs().max() <= 1e-5 * scale + 1e-9, name
