"""A batch as an external trainer gets it: padded tensors with one row per sample, or per fork of an agent's session."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from april.config.training import AlgorithmSection
from april.learner.batch import TrainingBatch, TrainSample, group_forks
from april.learner.credit import compared_rewards, row_advantages
from april.learner.losses import ADVANTAGES, find_checked
from april.trainers.rollouts.prompts import decode_extra

NO_VERSION = -1
"""Value of `RolloutBatch.versions` at tokens that no policy has sampled."""


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Complete groups as tensors: B samples of at most T tokens with their prompt, padded on the right.

    Per-token values are in the column of the token itself, not of the token that predicts it.
    """

    step: int
    """Number of the batch, from 0; training on it turns weights `step` into weights `step + 1`."""
    groups: list[list[TrainSample]]
    """The batch's samples as objects, group by group, with reward, version segments, finish reason, and supports under
    truncated sampling."""
    input_ids: Tensor
    """Token ids, int64 [B, T]; 0 in the padding."""
    attention_mask: Tensor
    """1 at tokens of prompt and response, 0 in the padding; int64 [B, T]."""
    response_mask: Tensor
    """True at tokens that the policy sampled, bool [B, T]; False at prompts, observations and padding."""
    logprobs: Tensor
    """Log-probabilities of sampled tokens under the policy that sampled them, at the run's temperature, float32 [B, T];
    0 elsewhere."""
    versions: Tensor
    """Policy step of the weights that sampled each token, int64 [B, T]; -1 elsewhere."""
    rewards: Tensor
    """Reward of each sample, float32 [B]."""
    advantages: Tensor
    """Advantage of each sample by `algorithm.advantage`, float32 [B]."""
    group: Tensor
    """Index in `groups` of each row's group, int64 [B]."""
    prompts: list[int]
    """For each group the number of its submitted prompt, from 0; [] where the trainer submits none."""
    extras: list[Any]
    """For each group the `extra` that was submitted with its prompt."""
    images: list[tuple[bytes, ...]]
    """For each row the PNG files of its images, in the order of their placeholders; () without any."""

    @property
    def checkpoint(self) -> int:
        """Policy step of the weights after this batch, to be passed to `connect` with a checkpoint saved now."""
        return self.step + 1

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """A copy with all tensors on `device`."""
        tensors = [field.name for field in fields(self) if isinstance(getattr(self, field.name), Tensor)]
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def gradient_counts(batch: RolloutBatch) -> dict[str, float]:
    """Metrics of a batch: its sampled `tokens` and its `groups`, and how many of each have a gradient
    (`trained_tokens`, `gradient_groups`), which are those with an advantage other than 0."""
    has_gradient = batch.advantages != 0
    return {
        "tokens": float(batch.response_mask.sum()),
        "trained_tokens": float(batch.response_mask[has_gradient].sum()),
        "groups": float(len(batch.groups)),
        "gradient_groups": float(len(batch.group[has_gradient].unique())),
    }


def to_tensors(batch: TrainingBatch, section: AlgorithmSection) -> RolloutBatch:
    """The batch as tensors, with advantages by the estimator that `section` names."""
    samples = batch.samples
    shape = len(samples), max((len(sample.tokens) for sample in samples), default=0)
    input_ids, attention_mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    logprobs, versions = torch.zeros(shape), torch.full(shape, NO_VERSION)
    for row, sample in enumerate(samples):
        first, end = sample.prompt_tokens, len(sample.tokens)
        input_ids[row, :end] = torch.tensor(sample.tokens)
        attention_mask[row, :end] = 1
        logprobs[row, first:end] = torch.tensor(sample.logprobs)
        for start, stop, version in sample.segments:
            versions[row, first + start : first + stop] = version.step
    response_mask = versions != NO_VERSION
    groups = [group_forks(group) for group in batch.groups]
    return RolloutBatch(
        batch.step,
        batch.groups,
        input_ids,
        attention_mask,
        response_mask,
        logprobs * response_mask,
        versions,
        torch.tensor([sample.reward for sample in samples]).float(),
        torch.from_numpy(
            row_advantages(
                find_checked(ADVANTAGES, section.advantage, section), groups, compared_rewards(groups, section)
            )
        ).float(),
        torch.tensor([number for number, group in enumerate(batch.groups) for _ in group], dtype=torch.int64),
        [number for number, _ in batch.origins],
        [decode_extra(extra) for _, extra in batch.origins],
        [sample.images for sample in samples],
    )
