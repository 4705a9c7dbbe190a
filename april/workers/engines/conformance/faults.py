"""Faults in weight transfer: what an engine may hold instead of the published version."""

from collections.abc import Callable, Mapping

import torch

Weights = dict[str, torch.Tensor]
STEP = 1e-3
"""Change of each weight in one training step, as with AdamW at that learning rate."""
CORRUPTED_TENSOR = "model.layers.1.mlp.up_proj.weight"
"""The tensor that is wrong, in faults of a single tensor."""


def a_step_further(weights: Weights, seed: int = 0) -> Weights:
    """Weights of the next version, one training step later."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + STEP * torch.randn(tensor.shape, generator=generator).sign().to(tensor.dtype)
        for name, tensor in weights.items()
    }


def all_of_the_version_before(old: Weights, new: Weights) -> Weights:
    return old


def one_of_the_version_before(old: Weights, new: Weights) -> Weights:
    return new | {CORRUPTED_TENSOR: old[CORRUPTED_TENSOR]}


def one_transposed(old: Weights, new: Weights) -> Weights:
    return new | {CORRUPTED_TENSOR: new[CORRUPTED_TENSOR].t().contiguous().view(new[CORRUPTED_TENSOR].shape)}


def two_layers_swapped(old: Weights, new: Weights) -> Weights:
    def other(name: str) -> str:
        first, second = "model.layers.0.", "model.layers.1."
        return name.replace(first, second) if first in name else name.replace(second, first)

    return {name: new[other(name)] for name in new}


def rounded_to_8_bits(old: Weights, new: Weights) -> Weights:
    return {name: tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for name, tensor in new.items()}


def one_ranks_shard_of_the_version_before(old: Weights, new: Weights) -> Weights:
    """The shard of the first of two ranks, the first half of the rows under FSDP2, is of the version before."""
    return {name: torch.cat([old[name][: -(-len(t) // 2)], t[-(-len(t) // 2) :]]) for name, t in new.items()}


FAULTS: Mapping[str, Callable[[Weights, Weights], Weights]] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        all_of_the_version_before,
        one_of_the_version_before,
        one_transposed,
        two_layers_swapped,
        rounded_to_8_bits,
        one_ranks_shard_of_the_version_before,
    )
}
"""fault(weights of the version before, published weights) -> weights that the engine gets, by the fault's name."""
