"""How far each engine was from the learner on the tokens that are trained: |log pi - log behaviour|, by worker.

Of tokens that were sampled under the very weights that a step begins with (age 0) the two are of the same
distribution, and what lies between them is rounding. Of older ones it is also what the policy has learnt since. So a
worker's figures are of the youngest that it has in the batch, and say how old these are.
"""

import numpy as np
import torch
from torch import Tensor

from april.learner.batch import TrainSample
from april.learner.diagnostics import AGES
from april.learner.losses.columns import log_ratio
from april.learner.losses.ranks import Ranks

MOST_WORKERS = 128
"""whose figures are reported, those that are furthest from the learner; metrics of a step are limited in number"""
PREFIX = "engine_gap_"
"""of the figures' names: engine_gap_FIGURE_WORKER"""


class EngineGaps:
    """Sums over the trained tokens of this rank, whose samples are of `samples`."""

    def __init__(self, samples: list[TrainSample], device: torch.device):
        self._makers = [makers(sample) for sample in samples]
        self._samples = samples
        self.workers = sorted({worker for made in self._makers for _, worker in made})
        shape = len(self.workers) * AGES
        self.sums = torch.zeros(2, shape, dtype=torch.float64, device=device)
        """tokens and gaps of each worker's tokens of each age"""
        self.largest = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, indices: list[int], logprobs: Tensor, behaviour: Tensor, ages: Tensor) -> None:
        """Of a micro-batch with the samples `indices`, end to end; [K] each."""
        if not self.workers:
            return
        known = [places_of(self._makers[i], self.workers, self._samples[i].sampled) for i in indices]
        of_tokens = torch.from_numpy(np.concatenate(known)).to(logprobs.device)
        places = (of_tokens * AGES + ages.clamp(0, AGES - 1))[of_tokens >= 0]
        gaps = log_ratio(logprobs.detach(), behaviour).abs().double()[of_tokens >= 0]
        self.sums.index_add_(1, places, torch.stack([torch.ones_like(gaps), gaps]))
        self.largest.scatter_reduce_(0, places, gaps, "amax")

    def reduced(self, ranks: Ranks) -> dict[str, float]:
        """`tokens`, `mean`, `largest` (nats) and `age` of each worker that has some, over all `ranks`. Collective."""
        if not self.workers:
            return {}
        self.sums, self.largest = ranks.total_and_largest(self.sums, self.largest)
        (tokens, gaps), largest = self.sums.view(2, -1, AGES).cpu().numpy(), self.largest.view(-1, AGES).cpu().numpy()
        found = []
        for worker, name in enumerate(self.workers):
            if not tokens[worker].any():
                continue
            age = int(np.flatnonzero(tokens[worker])[0])
            mean = gaps[worker, age] / tokens[worker, age]
            found.append((name, tokens[worker, age], mean, largest[worker, age], age))
        found.sort(key=lambda of_worker: -of_worker[2])
        return {
            f"{PREFIX}{figure}_{name}": float(value)
            for name, *values in found[:MOST_WORKERS]
            for figure, value in zip(("tokens", "mean", "largest", "age"), values, strict=True)
        }


def makers(sample: TrainSample) -> list[tuple[int, str]]:
    """(start, worker): response tokens from `start` on were sampled by that worker, up to the next one's."""
    found: list[tuple[int, str]] = []
    for stay in sample.stays:
        if stay.what == "generate":
            found = [*(made for made in found if made[0] < stay.start), (stay.start, stay.where)]
    return found


def places_of(made: list[tuple[int, str]], workers: list[str], tokens: np.ndarray) -> np.ndarray:
    """int64 [K]: the place among `workers` of who has sampled each of `tokens`; -1 where nobody has said it."""
    starts = [start for start, _ in made]
    places = np.array([-1, *(workers.index(worker) for _, worker in made)], np.int64)
    return places[np.searchsorted(starts, tokens, side="right")]
