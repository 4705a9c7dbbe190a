"""Comparison of named tensors."""

import torch


def same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    scale = max(value.abs().max().item() for value in theirs.values())
    for name, value in theirs.items():
        off = (ours[name] - value).abs().max().item()
        assert off <= tolerance * scale, f"{name}: off by {off} where gradients reach {scale}"


def equal(ours, theirs) -> bool:
    """Whether `theirs` has all tensors of `ours`, the same bit by bit."""
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())
