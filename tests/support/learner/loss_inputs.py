"""Inputs of losses, computed by hand."""

import math

import torch

from april.learner.losses.columns import Spans


def logs(*ratios):
    return torch.tensor([math.log(ratio) for ratio in ratios])


def spans(*lengths):
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Spans(index, torch.tensor(lengths, dtype=torch.float32))
