"""The learner's log-probability and entropy of each trained token, for the samples stored for reading."""

import numpy as np
import torch
from torch import Tensor

from april.config.learner import SamplesSection
from april.learner.batch import TrainSample
from april.learner.losses.ranks import Ranks


def keeps_samples(section: SamplesSection, step: int) -> bool:
    """Whether samples of batch `step` are stored: those of every `samples.every`-th batch, beginning with the first."""
    return section.every > 0 and step % section.every == 0


class TokenStats:
    """Log-probability and entropy of every sampled token of the trained samples, under the weights before the step."""

    def __init__(self, samples: list[TrainSample], device: torch.device):
        self.ends = np.cumsum([0, *(sample.sampled_tokens for sample in samples)])
        self.columns = torch.zeros(2, int(self.ends[-1]), device=device)

    def add(self, indices: list[int], logprobs: Tensor, entropies: Tensor) -> None:
        """Record a micro-batch with the samples `indices`, concatenated; [K] each."""
        positions = np.concatenate([np.arange(self.ends[i], self.ends[i + 1]) for i in indices])
        self.columns[:, torch.from_numpy(positions).to(self.columns.device)] = torch.stack(
            [logprobs.detach().float(), entropies.detach().float()]
        )

    def reduce(self, ranks: Ranks) -> None:
        """Combine the ranks' columns; each rank has recorded its own samples. Collective."""
        if self.columns.numel():
            self.columns = ranks.total(self.columns)

    def per_sample(self) -> list[np.ndarray]:
        """For each sample float32 [2, K]: log-probabilities, entropies."""
        return np.split(self.columns.cpu().numpy(), self.ends[1:], axis=1)[:-1]
