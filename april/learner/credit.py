"""Advantages that are known before a batch's training step, one for each row, from the rewards and lengths of its
samples."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from april.config.training import AlgorithmSection
from april.learner.batch import SampleForks
from april.learner.losses import LENGTH_PENALTIES, find_checked
from april.learner.losses.advantages import advantages


def sampled_token_count(forks: SampleForks) -> int:
    """Number of tokens that the policy sampled in all forks of a sample."""
    return sum(row.sampled_tokens for row in forks)


def sample_rewards(groups: list[list[SampleForks]]) -> list[Tensor]:
    """Rewards of each group's samples, float64; one reward per sample, shared by all its forks."""
    return [torch.tensor([rows[0].reward for rows in group], dtype=torch.float64) for group in groups]


def sample_lengths(groups: list[list[SampleForks]]) -> list[Tensor]:
    """Tokens that the policy sampled in each group's samples, float64."""
    return [torch.tensor(list(map(sampled_token_count, group)), dtype=torch.float64) for group in groups]


def compared_rewards(groups: list[list[SampleForks]], section: AlgorithmSection) -> list[Tensor]:
    """Rewards of each group's samples with the length penalty of `section`, float64."""
    rewards = sample_rewards(groups)
    if not section.length_penalty:
        return rewards
    added = find_checked(LENGTH_PENALTIES, section.length_penalty, section)(rewards, sample_lengths(groups))
    return [reward + section.length_coef * each for reward, each in zip(rewards, added, strict=True)]


def part_values(groups: list[list[SampleForks]], parts: Sequence[str]) -> list[Tensor]:
    """Values that the estimator `gdpo` compares in each group of n samples, float64 [n, P + 1]. If all samples have all
    P `parts` of the reward, these and then 0. If one lacks a part, since another verifier has scored it, P zeros and
    then the whole reward."""

    def values(rows: SampleForks, are_known: bool) -> list[float]:
        details = rows[0].details
        return [*(details[name] for name in parts), 0.0] if are_known else [*(0.0 for _ in parts), rows[0].reward]

    found = []
    for group in groups:
        are_known = all(name in rows[0].details for rows in group for name in parts)
        table = torch.tensor([values(rows, are_known) for rows in group], dtype=torch.float64)
        found.append(table.reshape(len(group), len(parts) + 1))
    return found


def row_advantages(
    estimator: Callable[..., list[Tensor]], groups: list[list[SampleForks]], values: list[Tensor] | None = None
) -> np.ndarray:
    """Advantages, float64, one per row; all forks of a sample have the advantage of the sample in its group.
    `estimator`: from `ADVANTAGES`. `values`: what the estimator compares in each group, its first argument; None: the
    rewards of the samples."""
    compared = sample_rewards(groups) if values is None else values
    group_advantages = advantages(estimator, compared, sample_lengths(groups))
    rows = [torch.tensor(list(map(len, group)), dtype=torch.int64) for group in groups]
    return np.concatenate(
        [
            np.zeros(0),
            *(found.repeat_interleave(each).numpy() for found, each in zip(group_advantages, rows, strict=True)),
        ]
    )
