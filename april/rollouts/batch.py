"""A batch as a trainer of one's own gets it: padded tensors, a row a sample, or a branch of an agent's session."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from april.learner.batch import Batch, TrainSample, sessions
from april.learner.objective import row_advantages
from april.rollouts.prompts import decoded

NOBODY = -1
"""the version of a token that no policy has sampled"""


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Complete groups: B samples, of at most T tokens with their prompt, padded on the right.

    What is said of a token stands in that token's own column, not in that of the token before.
    """

    step: int
    """its number, from 0: it turns weights `step` into weights `step + 1`"""
    groups: list[list[TrainSample]]
    """the same samples one by one, with reward, segments, reason to end, and the support of cut distributions"""
    input_ids: Tensor
    """int64 [B, T]; padded with 0"""
    attention_mask: Tensor
    """int64 [B, T]: 1 at prompt and response"""
    response_mask: Tensor
    """bool [B, T]: where the policy has sampled; neither prompt, nor observations of an environment, nor padding"""
    logprobs: Tensor
    """float32 [B, T]: of sampled tokens under the policy that sampled them, at the run's temperature; else 0"""
    versions: Tensor
    """int64 [B, T]: the step of the weights that sampled a token; else -1"""
    rewards: Tensor
    """float32 [B]"""
    advantages: Tensor
    """float32 [B], as `algorithm.advantage` says"""
    group: Tensor
    """int64 [B]: the group of a row, an index of `groups`"""
    prompts: list[int]
    """of each group: which of the prompts that were submitted, from 0; empty where none were"""
    extras: list[Any]
    """of each group: what was submitted beside its prompt"""

    @property
    def checkpoint(self) -> int:
        """Step of the weights that contain this batch: what `connect` is told of a checkpoint that was saved now."""
        return self.step + 1

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """With all tensors on `device`."""
        tensors = [field.name for field in fields(self) if isinstance(getattr(self, field.name), Tensor)]
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def to_tensors(batch: Batch, estimator: str) -> RolloutBatch:
    """`estimator`: the name of what computes advantages."""
    samples = batch.samples
    shape = len(samples), max((len(sample.tokens) for sample in samples), default=0)
    input_ids, attention_mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    logprobs, versions = torch.zeros(shape), torch.full(shape, NOBODY)
    for row, sample in enumerate(samples):
        first, end = sample.prompt_tokens, len(sample.tokens)
        input_ids[row, :end] = torch.tensor(sample.tokens)
        attention_mask[row, :end] = 1
        logprobs[row, first:end] = torch.tensor(sample.logprobs)
        for start, stop, version in sample.segments:
            versions[row, first + start : first + stop] = version.step
    response_mask = versions != NOBODY
    return RolloutBatch(
        batch.step,
        batch.groups,
        input_ids,
        attention_mask,
        response_mask,
        logprobs * response_mask,
        versions,
        torch.tensor([sample.reward for sample in samples]).float(),
        torch.from_numpy(row_advantages(estimator, [sessions(group) for group in batch.groups])).float(),
        torch.tensor([number for number, group in enumerate(batch.groups) for _ in group], dtype=torch.int64),
        [number for number, _ in batch.origins],
        [decoded(extra) for _, extra in batch.origins],
    )
