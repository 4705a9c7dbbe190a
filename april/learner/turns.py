"""Rewards of turns: the token score `algorithm.turn_reward` at the last token of each turn, and what a turn is credited
with.

A turn is what the policy sampled between two observations. Its return is its own reward, and those of later turns times
`algorithm.turn_discount` for each turn between; the reward of the response comes with the last turn.
"""

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from april.learner.batch import TrainSample
from april.learner.losses.advantages import advantages

SMALLEST_SCALE = 1e-150
"""Lower bound of scales that advantages are divided by: times a small reward it still does not underflow in float64."""

Turn = tuple[int, int]


def turns_of(sample: TrainSample) -> list[Turn]:
    """(start, end) of each turn among the K sampled tokens of a response; [(0, 0)] if K = 0."""
    found: list[Turn] = []
    count, covered = 0, -1
    for start, end, _ in sample.segments:
        size = end - start
        if start == covered and found:
            found[-1] = found[-1][0], count + size
        elif size:
            found.append((count, count + size))
        count, covered = count + size, end
    return found or [(0, 0)]


def turn_rewards(sample: TrainSample, name: str) -> np.ndarray:
    """Reward of each of the T turns of a response, float64 [T]: the token score `name` at the turn's last token; 0 for
    every turn of a sample without that score."""
    turns = turns_of(sample)
    if name not in sample.token_scores or not sample.sampled_tokens:
        return np.zeros(len(turns))
    scores = sample.token_scores[name][sample.sampled_positions]
    return np.array([scores[end - 1] for _, end in turns], np.float64)


def turn_returns(sample: TrainSample, name: str, discount: float) -> np.ndarray:
    """Return of each of the T turns of a response, float64 [T]: G_t = sum over s >= t of discount^(s - t) r_s. r_s is
    the reward of turn s, which the token score `name` holds; the last one includes the reward of the response."""
    returns = turn_rewards(sample, name)
    returns[-1] += sample.reward
    for t in reversed(range(len(returns) - 1)):
        returns[t] += discount * returns[t + 1]
    return returns


def turn_advantages(
    estimator: Callable[..., list[Tensor]], groups: Sequence[Sequence[TrainSample]], name: str, discount: float
) -> list[np.ndarray]:
    """Advantage of each sampled token of each sample, float64 [K]: `estimator` compares every turn as if it were a
    response of its group whose reward is the turn's return. `name`: token score of the turns' rewards. `discount`:
    `algorithm.turn_discount`."""
    turns = [[turns_of(sample) for sample in group] for group in groups]
    returns = [[turn_returns(sample, name, discount) for sample in group] for group in groups]
    joined = [torch.from_numpy(np.concatenate([np.zeros(0), *group])) for group in returns]
    lengths = [
        torch.tensor([end - start for of_sample in group for start, end in of_sample], dtype=torch.float64)
        for group in turns
    ]
    found = []
    for values, group in zip(advantages(estimator, joined, lengths), turns, strict=True):
        rest = iter(values.tolist())
        for of_sample in group:
            sizes = [end - start for start, end in of_sample]
            found.append(np.repeat([next(rest) for _ in of_sample], sizes))
    return found


def turn_columns(samples: Sequence[TrainSample], name: str) -> dict[str, np.ndarray]:
    """Columns float64 [K] for a critic, over the K sampled tokens of all samples: `turn_rewards`, the reward of a turn
    at its last token and 0 elsewhere, and `turns`, the number of a token's turn in its response, from 0. `name`: token
    score that has the rewards of turns."""
    rewards, numbers = [], []
    for sample in samples:
        turns = turns_of(sample)
        column = np.zeros(sample.sampled_tokens)
        if sample.sampled_tokens:
            column[[end - 1 for _, end in turns]] = turn_rewards(sample, name)
        rewards.append(column)
        numbers.append(np.repeat(np.arange(len(turns)), [end - start for start, end in turns]))
    return {"turn_rewards": np.concatenate(rewards), "turns": np.concatenate(numbers)}


def turns_in_range(discount: float) -> int:
    """Number of turns, at least one, over which powers of the discount stay above `SMALLEST_SCALE`."""
    return max(1, int(math.log(SMALLEST_SCALE) / math.log(discount))) if discount < 1 else sys.maxsize


def mean_advantages(by_token: Sequence[np.ndarray]) -> np.ndarray:
    """Mean advantage of each row, float64 [rows], from the advantages of its tokens, `by_token` [K] each; 0 for a row
    without tokens."""
    return np.array([each.mean() if len(each) else 0.0 for each in by_token])


def turn_metrics(samples: Sequence[TrainSample], name: str) -> dict[str, float]:
    """Metrics: mean reward of a turn, and share of the samples that have rewards of turns. `name`: token score that has
    these rewards, "" if none is configured. Empty without `name` or samples."""
    if not name or not samples:
        return {}
    rewards = np.concatenate([turn_rewards(sample, name) for sample in samples])
    known = sum(name in sample.token_scores for sample in samples)
    return {"turn_reward": float(rewards.mean()), "turn_rewards_known": known / len(samples)}
