"""What the trained tokens say about a step, split by their age; sums on each rank, reduced once a step."""

import torch
from torch import Tensor

from april.learner.losses.ranks import Ranks

AGES = 9
"""ages 0 to 7 have a bucket each, everything older shares the last one"""
BY_AGE = ("k1", "k3", "clip_fraction", "mask_fraction", "truncated_fraction", "ratio_mean", "weight_mean")
MEANS = ("entropy", *BY_AGE)
SUMS = ("tokens", *MEANS, "ratio_square", "weight_square", "reference_kl")
EFFECTIVE = {"ess": ("ratio_mean", "ratio_square"), "weight_ess": ("weight_mean", "weight_square")}
"""effective sample sizes, each of a sum and a sum of squares"""


class TokenTotals:
    """Sums over the trained tokens of this rank in an optimizer step; over those of all ranks once `reduced`."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(AGES, len(SUMS), dtype=torch.float64, device=device)
        self.sequences = torch.zeros(3, dtype=torch.float64, device=device)
        """their number, the sum of their ratios, and that of the squares"""
        self.has_reference = False

    def add(self, loss: Tensor, ages: Tensor, ratio: Tensor, weight: Tensor, **columns: Tensor) -> None:
        """`ratio` is pi / behaviour of each token, `weight` what corrections make of it; `columns` are the other names
        of SUMS, [K] each."""
        columns |= {"tokens": torch.ones_like(ratio), "ratio_mean": ratio, "weight_mean": weight}
        columns |= {"ratio_square": ratio.double().square(), "weight_square": weight.double().square()}
        self.has_reference |= "reference_kl" in columns
        blank = torch.zeros_like(ratio)
        rows = torch.stack([columns.get(name, blank).detach().double() for name in SUMS], dim=1)
        self.sums.index_add_(0, ages.clamp(0, AGES - 1), rows)
        self.loss += loss.detach().double()
        self.ratio_max = torch.maximum(self.ratio_max, ratio.max().double())

    def add_sequences(self, ratios: Tensor) -> None:
        """pi / behaviour of each response, the product over its tokens."""
        ratios = ratios.double()
        self.sequences += torch.stack([torch.ones_like(ratios).sum(), ratios.sum(), ratios.square().sum()])

    def reduced(self, ranks: Ranks) -> "TokenTotals":
        """Over all `ranks`. Collective."""
        packed = torch.cat([self.loss[None], self.sequences, self.sums.flatten()])
        packed, self.ratio_max = ranks.total_and_largest(packed, self.ratio_max)
        self.loss, self.sequences, self.sums = packed[0], packed[1:4], packed[4:].view(AGES, len(SUMS))
        return self

    @classmethod
    def over(cls, steps: list["TokenTotals"], epochs: int) -> "TokenTotals":
        """Of a batch, by those of the optimizer steps in which each token was trained `epochs` times: the steps' mean
        loss, and means over the tokens as they were seen in all epochs."""
        whole = cls(steps[0].sums.device)
        for step in steps:
            whole.loss += step.loss / len(steps)
            whole.sums += step.sums / epochs
            whole.sequences += step.sequences / epochs
            whole.ratio_max = torch.maximum(whole.ratio_max, step.ratio_max)
            whole.has_reference |= step.has_reference
        return whole

    def figures(self) -> dict[str, float]:
        """`loss`, `trained_tokens`, and means over them; NAME_age_A of the ages that there are.

        `ess` and `weight_ess` are the effective sample sizes of the ratios and of the weights that were applied, as
        shares of the tokens, `sequence_ess` that of the responses' ratios, as a share of the responses;
        `off_policy_share` the share of tokens older than the weights at hand. Means are absent when no token was
        trained, `reference_kl` also where there is no reference.
        """
        tokens = self.sums[:, 0].sum().item()
        result = {"loss": self.loss.item(), "trained_tokens": tokens}
        if not tokens:
            return result
        whole = means(self.sums.sum(0))
        result |= {name: whole[name] for name in (*MEANS, *EFFECTIVE)}
        result["sequence_ess"] = effective_share(*self.sequences.tolist())
        if self.has_reference:
            result["reference_kl"] = whole["reference_kl"]
        result["ratio_max"] = self.ratio_max.item()
        result["off_policy_share"] = 1 - self.sums[0, 0].item() / tokens
        for age, row in enumerate(self.sums):
            if row[0]:
                bucket, found = age_name(age), means(row)
                result[f"trained_tokens_age_{bucket}"] = row[0].item()
                result |= {f"{name}_age_{bucket}": found[name] for name in (*BY_AGE, *EFFECTIVE)}
        return result


def means(sums: Tensor) -> dict[str, float]:
    """Per-token means of one row of sums, and the effective sample shares."""
    found = dict(zip(SUMS, sums.tolist(), strict=True))
    result = {name: found[name] / found["tokens"] for name in SUMS}
    for name, (total, square) in EFFECTIVE.items():
        result[name] = effective_share(found["tokens"], found[total], found[square])
    return result


def effective_share(count: float, total: float, square: float) -> float:
    """The effective sample size of `count` weights, as a share of them, by their sum and the sum of their squares."""
    return total**2 / (count * square) if square else 0.0


def age_name(age: int) -> str:
    return f"{age}_up" if age == AGES - 1 else str(age)
