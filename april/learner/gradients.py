"""Optimizer and gradient clipping, the same for policy and critic."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from april.config import LearnerSection


def adamw(parameters: Iterable[nn.Parameter], lr: float, section: LearnerSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, betas=section.betas, weight_decay=section.weight_decay, fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients of a sharded model to a global L2 norm of at most `max_norm`; returns the norm before.
    Collective."""
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).double().square()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if norm > max_norm and math.isfinite(norm):
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm
