"""How the learner sees each token that it trains, for the samples that are kept to be read."""

import numpy as np
import torch
from torch import Tensor

from april.config.sections import SamplesSection
from april.learner.batch import TrainSample
from april.learner.losses.ranks import Ranks


def keeps(section: SamplesSection, step: int) -> bool:
    """Whether samples of this batch are kept: of the first, and of every `samples.every`-th from there."""
    return section.every > 0 and step % section.every == 0


class SeenTokens:
    """Log-probability and entropy of every token of the trained samples, under the weights before the step."""

    def __init__(self, samples: list[TrainSample], device: torch.device):
        self.ends = np.cumsum([0, *(sample.sampled_tokens for sample in samples)])
        self.columns = torch.zeros(2, int(self.ends[-1]), device=device)

    def add(self, indices: list[int], logprobs: Tensor, entropies: Tensor) -> None:
        """Of a micro-batch with the samples `indices`, end to end; [K] each."""
        places = np.concatenate([np.arange(self.ends[i], self.ends[i + 1]) for i in indices])
        self.columns[:, torch.from_numpy(places).to(self.columns.device)] = torch.stack(
            [logprobs.detach().float(), entropies.detach().float()]
        )

    def reduce(self, ranks: Ranks) -> None:
        """Each of `ranks` has seen its own samples. Collective."""
        if self.columns.numel():
            self.columns = ranks.total(self.columns)

    def of_samples(self) -> list[np.ndarray]:
        """float32 [2, K] a sample: log-probabilities, entropies."""
        return np.split(self.columns.cpu().numpy(), self.ends[1:], axis=1)[:-1]
