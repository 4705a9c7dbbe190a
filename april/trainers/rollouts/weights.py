"""Collect an external trainer's weights as workers take them: whole tensors on the CPU, by their Hugging Face names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from april.config import Config
from april.learner.model import await_copies, on_cpu, persistent_buffers
from april.weights.canary import Canary, canary_tokens, longest_canary, rounded_otherwise

Weights: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
WRAPPERS = ("module", "_orig_mod")
"""Attributes in which DistributedDataParallel and torch.compile keep the wrapped model."""


def unwrap(model: nn.Module) -> nn.Module:
    for name in WRAPPERS:
        if isinstance(inner := getattr(model, name, None), nn.Module):
            return unwrap(inner)
    return model


def collect(weights: Weights, keep: bool = True) -> dict[str, Tensor]:
    """CPU copies of the tensors by name; {} on ranks without `keep`. Collective if tensors are sharded.

    A tensor with two names, such as a tied head, is taken under the first. Tensors on an accelerator are rounded to
    bfloat16.
    """
    whole, seen, devices = {}, set(), set()
    for name, tensor in named_tensors(weights):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.device, local.data_ptr(), local.shape
        if local.numel() and storage in seen:
            continue
        seen.add(storage)
        if local.device.type == "cuda":
            devices.add(local.device)
        copied = to_host(tensor)
        if keep:
            whole[name] = copied
    await_copies(devices)
    if keep and isinstance(weights, nn.Module) and isinstance(model := unwrap(weights), PreTrainedModel):
        return dict(revert_weight_conversion(model, whole))
    return whole


def named_tensors(weights: Weights) -> Iterable[tuple[str, Tensor]]:
    if isinstance(weights, nn.Module):
        model = unwrap(weights)
        return [*model.named_parameters(), *persistent_buffers(model)]
    return weights.items() if isinstance(weights, Mapping) else weights


def to_host(tensor: Tensor) -> Tensor:
    """A whole copy on the CPU, complete after `await_copies`; floats on an accelerator are rounded to bfloat16."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" and tensor.is_floating_point():
        tensor = tensor.to(torch.bfloat16)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True) if tensor.device.type == "cpu" else on_cpu(tensor)


Score: TypeAlias = Callable[[np.ndarray], Sequence[float]]
"""Function ids, int32 [T] -> log-probability of each id but the first given the ids before it, at temperature 1, [T -
1]."""


def canary_from_score(score: Score, config: Config) -> Canary:
    """The canary (a fixed text that verifies loaded weights) with its log-probabilities as the trainer's function
    `score` computes them. Raises ValueError if they are not as many as expected."""
    if config.vocabulary is None:
        raise ValueError("model.path has no vocab_size in its config.json, by which the canary's tokens are chosen")
    tokens = canary_tokens(config.vocabulary, longest_canary(config))
    logprobs = [float(logprob) for logprob in score(tokens)]
    if len(logprobs) != len(tokens) - 1:
        raise ValueError(
            f"score gave {len(logprobs)} log-probabilities of {len(tokens)} tokens; give one less than them"
        )
    return Canary(tokens.tolist(), logprobs, "bfloat16")


def canary_from_model(weights: Weights, config: Config) -> Canary | None:
    """The canary (a fixed text that verifies loaded weights) with its log-probabilities under `weights`; None unless
    `weights` is a transformers model. Collective if its tensors are sharded."""
    if not (config.weights.canary and isinstance(weights, nn.Module)):
        return None
    model = unwrap(weights)
    if not isinstance(model, PreTrainedModel):
        return None
    tokens = canary_tokens(model.get_input_embeddings().num_embeddings, longest_canary(config))
    ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)[None]
    trained = model.training
    model.eval()
    logprobs = scores(model, ids)
    with rounded_otherwise(model):
        rounding = (scores(model, ids) - logprobs).abs().mean().item()
    model.train(trained)
    exact = model.dtype == torch.float32 and model.device.type == "cpu"
    return Canary(tokens.tolist(), logprobs.tolist(), "float32" if exact else "bfloat16", rounding)


@torch.no_grad()
def scores(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities, float32 [T - 1], of `ids` int64 [1, T] but the first, at temperature 1."""
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]
