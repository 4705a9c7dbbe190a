"""Statistics of the trained tokens: log-probability and entropy of each token, stored with samples; and the gap between
the learner's and the inference engines' log-probabilities."""

import numpy as np
import torch
from torch import Tensor

from april.config.learner import SamplesSection
from april.learner.batch import TrainSample
from april.learner.diagnostics import AGES
from april.learner.losses.columns import log_ratio
from april.learner.losses.ranks import Ranks
from april.wire.training import ENGINE_GAP_PREFIX


def keeps_samples(section: SamplesSection, step: int) -> bool:
    """Whether samples of batch `step` are stored: those of every `samples.every`-th batch, beginning with the first."""
    return section.every > 0 and step % section.every == 0


class TokenStats:
    """Log-probability and entropy of every sampled token of the trained samples, under the weights before the step."""

    def __init__(self, samples: list[TrainSample], device: torch.device):
        self.ends = np.cumsum([0, *(sample.sampled_tokens for sample in samples)])
        self.columns = torch.zeros(2, int(self.ends[-1]), device=device)

    def add(self, indices: list[int], logprobs: Tensor, entropies: Tensor) -> None:
        """Record the log-probabilities and entropies, [K] each, of a micro-batch that concatenates the samples
        `indices`."""
        positions = np.concatenate([np.arange(self.ends[i], self.ends[i + 1]) for i in indices])
        self.columns[:, torch.from_numpy(positions).to(self.columns.device)] = torch.stack(
            [logprobs.detach().float(), entropies.detach().float()]
        )

    def reduce(self, ranks: Ranks) -> None:
        """Combine the ranks' columns; each rank has recorded its own samples. Collective."""
        if self.columns.numel():
            self.columns = ranks.total(self.columns)

    def per_sample(self) -> list[np.ndarray]:
        """For each sample an array float32 [2, K] of its K sampled tokens: row 0 log-probabilities, row 1 entropies."""
        return np.split(self.columns.cpu().numpy(), self.ends[1:], axis=1)[:-1]


# --- gap between learner and engine -----------------------------------------------------------------------------------

MOST_WORKERS = 128
"""Maximum number of workers whose gap between the learner's and the engine's log-probabilities is reported in a step:
those with the largest mean gap. It bounds the number of metrics."""


class EngineGaps:
    """Sums over this rank's trained tokens, by worker and token age, of the gap |log pi - log mu| between the learner's
    and the inference engine's log-probability."""

    def __init__(self, samples: list[TrainSample], device: torch.device):
        self._sampling_workers = [sampling_workers(sample) for sample in samples]
        self._samples = samples
        self.workers = sorted({worker for sampled_by in self._sampling_workers for _, worker in sampled_by})
        cells = len(self.workers) * AGES
        self.sums = torch.zeros(2, cells, dtype=torch.float64, device=device)
        """float64 [2, workers * AGES], a column per worker and token age: number of tokens, and sum of their gaps
        |log pi - log mu| (nats)."""
        self.largest = torch.zeros(cells, dtype=torch.float64, device=device)

    def add(self, indices: list[int], logprobs: Tensor, behaviour: Tensor, ages: Tensor) -> None:
        """Add the gaps |log pi - log mu| of a micro-batch that concatenates the samples `indices`. [K] each:
        `logprobs`, log pi of the learner; `behaviour`, log mu of the engine; `ages`, policy steps since a token was
        sampled."""
        if not self.workers:
            return
        indices_by_sample = [
            worker_indices(self._sampling_workers[i], self.workers, self._samples[i].sampled_positions) for i in indices
        ]
        worker_of_token = torch.from_numpy(np.concatenate(indices_by_sample)).to(logprobs.device)
        cells = (worker_of_token * AGES + ages.clamp(0, AGES - 1))[worker_of_token >= 0]
        gaps = log_ratio(logprobs.detach(), behaviour).abs().double()[worker_of_token >= 0]
        self.sums.index_add_(1, cells, torch.stack([torch.ones_like(gaps), gaps]))
        self.largest.scatter_reduce_(0, cells, gaps, "amax")

    def reduced(self, ranks: Ranks) -> dict[str, float]:
        """Metrics of each worker with trained tokens, over all `ranks`, at the youngest age (policy steps) of its
        tokens: that `age`, number of `tokens`, `mean` and `largest` gap |log pi - log mu| (nats). Collective."""
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
        found.sort(key=lambda row: -row[2])
        return {
            f"{ENGINE_GAP_PREFIX}{figure}_{name}": float(value)
            for name, *values in found[:MOST_WORKERS]
            for figure, value in zip(("tokens", "mean", "largest", "age"), values, strict=True)
        }


def sampling_workers(sample: TrainSample) -> list[tuple[int, str]]:
    """(start, worker), in order: the worker that sampled the response tokens from `start` to the next entry's start."""
    found: list[tuple[int, str]] = []
    for span in sample.spans:
        if span.activity == "generate":
            found = [*(sampled_by for sampled_by in found if sampled_by[0] < span.start), (span.start, span.holder)]
    return found


def worker_indices(sampled_by: list[tuple[int, str]], workers: list[str], tokens: np.ndarray) -> np.ndarray:
    """int64 [K]: index in `workers` of the worker that sampled each of the response positions `tokens`; -1 if unknown.
    `sampled_by`: result of `sampling_workers`."""
    starts = [start for start, _ in sampled_by]
    indices = np.array([-1, *(workers.index(worker) for _, worker in sampled_by)], np.int64)
    return indices[np.searchsorted(starts, tokens, side="right")]
