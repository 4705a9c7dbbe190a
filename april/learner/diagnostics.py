"""Diagnostics of a training step: token metrics by age, as sums on each rank that are reduced over the ranks once a
step; and repetitive responses."""

import numpy as np
import torch
from torch import Tensor

from april.learner.losses.ranks import Ranks

AGES = 9
"""Number of age buckets: ages 0 to 7 policy steps have one each, older tokens share the last."""
BY_AGE = ("k1", "k3", "clip_fraction", "mask_fraction", "truncated_fraction", "ratio_mean", "weight_mean")
MEANS = ("entropy", *BY_AGE)
OPTIONAL = ("reference_kl", "teacher_kl", "teacher_divergence", "teacher_top_k_mass")
"""Names of token means that only some runs have, each over those tokens that have a value."""
SUMS = ("tokens", *MEANS, "ratio_square", "weight_square", *OPTIONAL, *(f"{name}_tokens" for name in OPTIONAL))
BY_SOURCE = ("entropy", "k1", "k3", "clip_fraction", "mask_fraction")
EFFECTIVE = {"ess": ("ratio_mean", "ratio_square"), "weight_ess": ("weight_mean", "weight_square")}
"""By name of a metric that is an effective sample size: the columns in SUMS with the sum and the sum of squares of its
weights."""


class StepTotals:
    """Sums over the trained tokens of this rank in an optimizer step; over all ranks after `reduced`."""

    def __init__(self, device: torch.device, sources: int = 1, conversation_sources: int = 0):
        """`sources`: number of sources that the samples may be from. `conversation_sources`: number of all sources if
        one of them is of kind sft, otherwise 0."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(sources, AGES, len(SUMS), dtype=torch.float64, device=device)
        self.sequences = torch.zeros(3, dtype=torch.float64, device=device)
        """Float64 [3]: number of responses, sum of their ratios, sum of the squared ratios."""
        self.conversations = torch.zeros(conversation_sources, 2, dtype=torch.float64, device=device)
        """Float64 [sources, 2]: trained tokens of conversations, and the sum of their cross-entropies (nats)."""

    def add(
        self,
        loss: Tensor,
        ages: Tensor,
        ratio: Tensor,
        weight: Tensor,
        sources: Tensor | None = None,
        **columns: Tensor,
    ) -> None:
        """Add a micro-batch of K tokens: its `loss`, and columns [K]. `ages` are in policy steps, int64; `ratio` is
        pi / mu; `weight` is the product of the off-policy corrections; `sources` has the number of each token's source,
        int64 (None: all 0). Further `columns` have names that are in SUMS."""
        ones, blank = torch.ones_like(ratio), torch.zeros_like(ratio)
        columns |= {"tokens": ones, "ratio_mean": ratio, "weight_mean": weight}
        columns |= {"ratio_square": ratio.double().square(), "weight_square": weight.double().square()}
        columns |= {f"{name}_tokens": ones for name in columns.keys() & {*OPTIONAL}}
        rows = torch.stack([columns.get(name, blank).detach().double() for name in SUMS], dim=1)
        cells = ages.clamp(0, AGES - 1) + (0 if sources is None else AGES * sources)
        self.sums.view(-1, len(SUMS)).index_add_(0, cells, rows)
        self.loss += loss.detach().double()
        self.ratio_max = torch.maximum(self.ratio_max, ratio.max().double())

    def add_sequences(self, ratios: Tensor) -> None:
        """Add the ratios pi / mu of S responses, each the product over the response's tokens; float [S]."""
        ratios = ratios.double()
        self.sequences += torch.stack([torch.ones_like(ratios).sum(), ratios.sum(), ratios.square().sum()])

    def add_conversations(self, loss: Tensor, sources: Tensor, logprobs: Tensor) -> None:
        """Add a micro-batch of conversations: its `loss`, and the source (int64) and log-probability of each token
        [K]."""
        found = torch.stack([torch.ones_like(logprobs), -logprobs], dim=1).detach().double()
        self.conversations.index_add_(0, sources, found)
        self.loss += loss.detach().double()

    def reduced(self, ranks: Ranks) -> "StepTotals":
        """Sum the totals over `ranks`, in place; returns this object. Collective."""
        of_sums = self.sums.numel()
        packed = torch.cat([self.loss[None], self.sequences, self.sums.flatten(), self.conversations.flatten()])
        packed, self.ratio_max = ranks.total_and_largest(packed, self.ratio_max)
        self.loss, self.sequences, self.sums = packed[0], packed[1:4], packed[4 : 4 + of_sums].view(self.sums.shape)
        self.conversations = packed[4 + of_sums :].view(self.conversations.shape)
        return self

    @classmethod
    def combined(cls, steps: list["StepTotals"], epochs: int) -> "StepTotals":
        """Totals of a batch from its optimizer steps, which trained each token `epochs` times: mean loss of the steps,
        and token sums averaged over epochs."""
        whole = cls(steps[0].sums.device, len(steps[0].sums), len(steps[0].conversations))
        for step in steps:
            whole.loss += step.loss / len(steps)
            whole.sums += step.sums / epochs
            whole.sequences += step.sequences / epochs
            whole.conversations += step.conversations / epochs
            whole.ratio_max = torch.maximum(whole.ratio_max, step.ratio_max)
        return whole

    def metrics(self) -> dict[str, float]:
        """`loss`, `trained_tokens`, means over these tokens, and NAME_age_A for each age A that occurs.

        `ess` and `weight_ess` are the effective sample sizes of the ratios and of the applied weights, as shares of the
        tokens; `sequence_ess` that of the responses' ratios, as a share of the responses; `off_policy_share` the share
        of tokens older than the current weights. Means are absent if no token was trained, `reference_kl` also without
        a reference model, those of a teacher without one. With several sources also of each, as NAME_source_S. With
        conversations, `sft_tokens` trained and their mean cross-entropy `sft_loss` (nats).
        """
        by_age = self.sums.sum(0)
        tokens = by_age[:, 0].sum().item()
        result = {"loss": self.loss.item(), "trained_tokens": tokens} | conversation_figures(self.conversations)
        if not tokens:
            return result
        whole = means(by_age.sum(0))
        result |= {name: whole[name] for name in (*MEANS, *EFFECTIVE)}
        result["sequence_ess"] = effective_share(*self.sequences.tolist())
        result |= {name: whole[name] for name in OPTIONAL if name in whole}
        result["ratio_max"] = self.ratio_max.item()
        result["off_policy_share"] = 1 - by_age[0, 0].item() / tokens
        for source, row in enumerate(self.sums.sum(1)) if len(self.sums) > 1 else ():
            if row[0]:
                found = means(row)
                result[f"trained_tokens_source_{source}"] = row[0].item()
                result |= {f"{name}_source_{source}": found[name] for name in (*BY_SOURCE, *OPTIONAL) if name in found}
        for age, row in enumerate(by_age):
            if row[0]:
                bucket, found = age_name(age), means(row)
                result[f"trained_tokens_age_{bucket}"] = row[0].item()
                result |= {f"{name}_age_{bucket}": found[name] for name in (*BY_AGE, *EFFECTIVE)}
        return result


def conversation_figures(conversations: Tensor) -> dict[str, float]:
    """The metrics `sft_tokens`, number of trained tokens, and `sft_loss`, their mean cross-entropy (nats). With
    conversations of several sources, also those of each source, as NAME_source_S; {} without trained tokens.
    `conversations`: [sources, 2], tokens of each source and the sum of their cross-entropies."""
    rows = {f"_source_{source}": row for source, row in enumerate(conversations.tolist()) if row[0]}
    rows = {"": conversations.sum(0).tolist()} | (rows if len(rows) > 1 else {}) if rows else {}
    return {
        name: value
        for suffix, (tokens, total) in rows.items()
        for name, value in ((f"sft_tokens{suffix}", tokens), (f"sft_loss{suffix}", total / tokens))
    }


def means(sums: Tensor) -> dict[str, float]:
    """Metrics from one row of sums, which has the columns `SUMS`: means over the tokens (those of OPTIONAL over the
    tokens that have a value), and effective sample sizes as shares of the tokens."""
    found = dict(zip(SUMS, sums.tolist(), strict=True))
    result = {name: found[name] / found["tokens"] for name in MEANS}
    result |= {name: found[name] / found[f"{name}_tokens"] for name in OPTIONAL if found[f"{name}_tokens"]}
    for name, (total, square) in EFFECTIVE.items():
        result[name] = effective_share(found["tokens"], found[total], found[square])
    return result


def effective_share(count: float, total: float, square: float) -> float:
    """Effective sample size (sum w)^2 / sum w^2 of `count` weights w, as a share of `count`; 0 if all weights are 0.
    `total`: sum of w; `square`: sum of w^2."""
    return total**2 / (count * square) if square else 0.0


def age_name(age: int) -> str:
    return f"{age}_up" if age == AGES - 1 else str(age)


# --- repetitive responses ---------------------------------------------------------------------------------------------

EXAMINED_TOKENS = 512
"""Number of tokens at the end of a response that are examined for a repetition."""
MIN_REPETITION_TOKENS, MIN_REPEATS = 48, 4
"""Least total length of a repetition, in tokens, and least number of repeats."""
MAX_PERIODS = 8
"""Most candidate periods that are tried: the shortest distances, in tokens, at which the response's last tokens
occurred before."""
WINDOW_TOKENS = 4
"""Length in tokens of the response's end whose earlier occurrences give the candidate periods of a repetition."""


def is_repetitive(response: np.ndarray) -> bool:
    """Whether `response`, token ids int32 [T], ends in a repetition: the same tokens at least `MIN_REPEATS` times one
    after the other, at least `MIN_REPETITION_TOKENS` tokens in all."""
    if len(response) < MIN_REPETITION_TOKENS:
        return False
    tail = response[-EXAMINED_TOKENS:]
    windows = np.lib.stride_tricks.sliding_window_view(tail, WINDOW_TOKENS)
    periods = len(windows) - 1 - np.flatnonzero((windows[:-1] == windows[-1]).all(axis=1))
    return any(repeats_with_period(tail, int(period)) for period in periods[::-1][:MAX_PERIODS])


def repeats_with_period(tail: np.ndarray, period: int) -> bool:
    length = max(MIN_REPETITION_TOKENS, MIN_REPEATS * period)
    if length > len(tail):
        return False
    end = tail[-length:]
    return bool((end[period:] == end[:-period]).all())
