"""Memory that a training pass of a model keeps for its backward pass, found without allocating any: the model's own
forward pass runs over tensors that have shapes and no values, and the tensors that autograd would keep are counted."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from april.config.training import LoraSection
from april.learner import lora
from april.learner.attention import Packing
from april.learner.context import objection_to_sharing
from april.learner.loading import ModelError
from april.learner.model import Policy, choose_experts_implementation, empty_policy
from april.learner.optimizers.base import is_matrix
from april.learner.vision import freeze_tower, text_model, tower_blocks
from april.util.errors import ConfigError
from april.util.text import first_line

SHARERS = (1, 2, 4, 8)
SEQUENCES = 4
"""Number of sequences in the packed row over which the model's forward pass is run."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of a whole model, not sharded, as it is trained."""

    model: int
    """Number of the model's parameters."""
    held_bytes: int
    """Bytes of the weights in the dtypes in which they are held, those of the adapter among them."""
    trained: int
    """Number of trained parameters."""
    matrices: int
    """Number of trained parameters in matrices of the layers, which the optimizer Muon updates as whole matrices."""
    hidden: int
    """Hidden size of the model."""
    vocabulary: int
    layers: int
    layer: int
    """Number of parameters of the largest layer."""
    outside: int
    """Number of parameters outside the layers, such as the embedding's; those of a tied head are counted once."""
    kept_bytes: float
    """Bytes per token that all layers together keep for the backward pass."""
    largest_bytes: float
    """The most that a single layer keeps, bytes per token."""
    sharers: int
    """Largest number of ranks among `SHARERS` that can share a packed row of the model (context parallelism)."""


def footprint(
    folder: Path, adapter: LoraSection, bf16: bool, tokens: int = 1024, freeze_vision: bool = True
) -> Footprint:
    """Sizes of the model of a folder's config.json, trained whole or by an adapter, with passes in bfloat16 or in fp32,
    as found on a packed row of `tokens` tokens. A vision tower that is trained (not `freeze_vision`) keeps bytes as if
    every token were of an image. Raises ModelError for a model that the learner does not train, or whose forward pass
    depends on values of tensors."""
    policy = policy_to_train(folder, adapter)
    if freeze_vision:
        freeze_tower(policy.lm)
    plain = policy_to_train(folder, LoraSection()) if adapter.is_set else policy
    own = sum(parameter.numel() for parameter in plain.parameters())
    held = sum(parameter.numel() * parameter.itemsize for parameter in policy.parameters())
    trained = sum(parameter.numel() for _, parameter in policy.trained)
    matrices = sum(parameter.numel() for name, parameter in policy.trained if is_matrix(name, parameter))
    layers = [sum(parameter.numel() for parameter in each.parameters()) for each in text_model(policy.lm).layers]
    outside = sum(parameter.numel() for parameter in policy.parameters()) - sum(layers)
    sharers = max(size for size in SHARERS if not objection_to_sharing(policy.lm, size))
    vocabulary, hidden = policy.lm.get_output_embeddings().weight.shape
    scale, dtype = 1 / tokens, torch.bfloat16 if bf16 else torch.float32
    in_tower = 0.0 if freeze_vision else kept_by_tower(policy_to_train(folder, adapter).lm, dtype)
    try:
        rest, *kept = kept_by_layer(policy, dtype, tokens)
    except ModelError:
        if bf16:
            raise
        rest, *kept = kept_by_layer(policy_to_train(folder, adapter), torch.bfloat16, tokens)
        scale *= 2  # experts' grouped products are known in 16 bits alone; fp32 keeps at most twice as much
    total, largest = (rest + sum(kept)) * scale + in_tower, max(kept) * scale
    sizes = own, held, trained, matrices, hidden, vocabulary, len(layers), max(layers), outside
    return Footprint(*sizes, total, largest, sharers)


def policy_to_train(folder: Path, adapter: LoraSection) -> Policy:
    """The policy with its adapter, on the meta device. Raises ModelError."""
    try:
        policy = empty_policy(folder, temperature=1.0)
        policy.lm.tie_weights()
        choose_experts_implementation(policy.lm, torch.bfloat16)
        if adapter.is_set:
            lora.attach(policy.lm, adapter, seed=0)
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # what transformers raises of a config.json has no bounds
        raise ModelError(f"{folder}: no model can be made of its config.json ({first_line(error)})") from error
    return policy


def kept_by_layer(policy: Policy, dtype: torch.dtype, tokens: int) -> list[int]:
    """Bytes that the policy's body keeps of a row of `tokens` tokens in passes of `dtype`: first those outside its
    layers, then those of each layer. The policy has no weights afterwards."""
    held, marks = list[Tensor](), list[int]()
    """`held`: tensors that autograd keeps. `marks`: bytes kept so far, noted before and after each layer."""
    kept: dict[int, int] = {}
    """Bytes of each kept storage that is not a parameter's, by the storage's identity."""
    length = tokens // SEQUENCES
    with FakeTensorMode(allow_non_fake_inputs=True):
        body = policy.lm.base_model
        body.to_empty(device="cpu")
        for parameter in body.parameters():
            parameter.data = parameter.data.to(dtype) if parameter.is_floating_point() else parameter.data
        own = {parameter.untyped_storage()._cdata for parameter in body.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory._cdata not in own:
                kept[memory._cdata] = memory.nbytes()
                held.append(tensor)
            return tensor

        def mark(*_: object) -> None:
            marks.append(sum(kept.values()))

        for layer in text_model(policy.lm).layers:
            layer.register_forward_pre_hook(mark)
            layer.register_forward_hook(mark)
        packing = Packing([length] * SEQUENCES, torch.arange(SEQUENCES + 1, dtype=torch.int32) * length)
        positions = torch.arange(tokens)[None] % length
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                body(
                    input_ids=torch.zeros(1, tokens, dtype=torch.int64), position_ids=positions, attention_mask=None,
                    use_cache=False, packing=packing,
                )  # fmt: skip
        except Exception as error:
            why = f"what a pass of this model keeps cannot be told without running it ({first_line(error)})"
            raise ModelError(why) from error
    inside = [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)]
    return [sum(kept.values()) - sum(inside), *inside]


def kept_by_tower(lm: nn.Module, dtype: torch.dtype, tokens: int = 64) -> float:
    """Bytes that the layers of a vision tower keep for each token of an image, found on an image of `tokens` tokens; 0
    if no tower is trained."""
    blocks, kept = tower_blocks(lm), dict[int, tuple[int, Tensor]]()
    if not any(parameter.requires_grad for block in blocks for parameter in block.parameters()):
        return 0.0
    block, patches = blocks[0], tokens * lm.config.vision_config.spatial_merge_size**2
    with FakeTensorMode(allow_non_fake_inputs=True):
        block.to_empty(device="cpu")
        for parameter in block.parameters():
            parameter.data = parameter.data.to(dtype)
        own = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory._cdata not in own:
                kept[memory._cdata] = memory.nbytes(), tensor
            return tensor

        hidden = torch.zeros(patches, block.attn.qkv.in_features, dtype=dtype)
        angles = torch.zeros(patches, block.attn.head_dim)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(hidden, cu_seqlens=np.array([0, patches]), position_embeddings=(angles, angles))
    return len(blocks) * sum(size for size, _ in kept.values()) / tokens
