"""Inputs of losses, computed by hand."""

import math

import torch

from april.learner.losses.columns import Spans
from april.learner.losses.corrections import StaleTokens


def logs(*ratios):
    return torch.tensor([math.log(ratio) for ratio in ratios])


def spans(*lengths):
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Spans(index, torch.tensor(lengths, dtype=torch.float32))


class Alone:
    """`Ranks` of a single rank, without a process group."""

    def total(self, values):
        return values

    def gathered(self, column):
        return column


def stale_tokens(ratios, advantages=None, behaviour=0.0, lengths=None, ages=None):
    """Stale tokens with the given ratios pi / mu, the proximal policy being pi."""
    mu = torch.full((len(ratios),), behaviour)
    now = mu + logs(*ratios)
    return stale(now, mu, torch.tensor(advantages or [1.0] * len(ratios)), lengths or [len(ratios)], ages)


def stale(now, behaviour, advantages, lengths, ages=None):
    """Stale tokens with the proximal policy pi; all of age 1 unless said."""
    ages = torch.tensor(ages or [1] * len(now))
    return StaleTokens(now, now, behaviour, advantages, ages, spans(*lengths), Alone())
