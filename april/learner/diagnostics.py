"""What the trained tokens say about a step, split by their age; sums on each rank, reduced once a step."""

import torch
import torch.distributed as dist
from torch import Tensor

AGES = 9
"""ages 0 to 7 have a bucket each, everything older shares the last one"""
SUMS = ("tokens", "entropy", "k1", "k3", "clip_fraction", "mask_fraction", "ratio_mean", "ratio_square", "reference_kl")
MEANS = ("entropy", "k1", "k3", "clip_fraction", "mask_fraction", "ratio_mean")
BY_AGE = ("k1", "k3", "clip_fraction", "mask_fraction", "ratio_mean")


class TokenTotals:
    """Sums over the trained tokens of this rank."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(AGES, len(SUMS), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, ages: Tensor, ratio: Tensor, **columns: Tensor) -> None:
        """`ratio` is pi / behaviour of each token; `columns` are the other names of SUMS, [K] each."""
        columns |= {"tokens": torch.ones_like(ratio), "ratio_mean": ratio, "ratio_square": ratio.double().square()}
        blank = torch.zeros_like(ratio)
        rows = torch.stack([columns.get(name, blank).detach().double() for name in SUMS], dim=1)
        self.sums.index_add_(0, ages.clamp(0, AGES - 1), rows)
        self.loss += loss.detach().double()
        self.ratio_max = torch.maximum(self.ratio_max, ratio.max().double())

    def reduced(self) -> dict[str, float]:
        """`loss`, `trained_tokens`, and means over them, over all ranks; NAME_age_A of the ages that there are.

        `ess` is the effective sample size of the ratios as a share of the tokens, `off_policy_share` the share of
        tokens older than the weights at hand. Means are absent when no token was trained.
        """
        packed = torch.cat([self.loss[None], self.sums.flatten()])
        dist.all_reduce(packed)
        dist.all_reduce(self.ratio_max, dist.ReduceOp.MAX)
        loss, by_age = packed[0].item(), packed[1:].view(AGES, len(SUMS))
        tokens = by_age[:, 0].sum().item()
        result = {"loss": loss, "trained_tokens": tokens}
        if not tokens:
            return result
        whole = means(by_age.sum(0))
        result |= {name: whole[name] for name in (*MEANS, "ess", "reference_kl")}
        result["ratio_max"] = self.ratio_max.item()
        result["off_policy_share"] = 1 - by_age[0, 0].item() / tokens
        for age, row in enumerate(by_age):
            if row[0]:
                bucket, found = age_name(age), means(row)
                result[f"trained_tokens_age_{bucket}"] = row[0].item()
                result |= {f"{name}_age_{bucket}": found[name] for name in (*BY_AGE, "ess")}
        return result


def means(sums: Tensor) -> dict[str, float]:
    """Per-token means of one row of sums, and the effective sample share."""
    found = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens, squares = found["tokens"], found["ratio_square"]
    result = {name: found[name] / tokens for name in SUMS}
    result["ess"] = found["ratio_mean"] ** 2 / (tokens * squares) if squares else 0.0
    return result


def age_name(age: int) -> str:
    return f"{age}_up" if age == AGES - 1 else str(age)
