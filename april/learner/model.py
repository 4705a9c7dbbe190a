"""The trained policy: a Hugging Face causal LM that scores packed responses, sharded with FSDP2."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from april.config import LearnerSection
from april.learner import attention
from april.learner.head import GROUPED_BYTES, score_tokens, with_bias
from april.learner.loading import LogitMap, ModelError, empty_model, load_weights, logit_map, persistent_buffers
from april.learner.packing import HeadInputs, MicroBatch
from april.learner.vision import text_model, tower_blocks

BUCKET_BYTES = 16 * 2**20
"""Most bytes of a bucket: the parameters that are gathered to a rank together. It is the size that is fastest with
gloo."""
Model = TypeVar("Model", bound=nn.Module)
"""A module with a language model, or the body of one, as attribute `lm`."""


class Policy(nn.Module):
    """The language model `lm`, with a forward pass that scores the response tokens of a packed micro-batch.

    Body and head run inside this one forward pass, so that one FSDP group around it owns embedding, final norm and
    head. Using the head's weight outside would drop its gradient from the reduction.
    """

    def __init__(self, lm: nn.Module, temperature: float, logits: LogitMap | None = None):
        super().__init__()
        self.lm = lm
        self.temperature, self.logits = temperature, logits or LogitMap()
        self.compiled = False
        """Whether `compile_layers` has compiled the layers."""
        self.logit_dtype = torch.float32
        """Type to which logits are rounded; another than float32 shows what rounding does, and has no gradients."""

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """(name in `lm`, parameter) of each trained parameter."""
        return [(name, parameter) for name, parameter in self.lm.named_parameters() if parameter.requires_grad]

    def forward(
        self,
        micro: MicroBatch,
        temperature: float | None = None,
        inputs_alone: bool = False,
        kept_head: Tensor | None = None,
    ) -> tuple[Tensor, ...] | HeadInputs:
        """(log-probability, entropy) of each target of `micro`, float32 [K] each, over its support if there is one, at
        the policy's sampling temperature unless `micro` or the caller gives another; then the divergence from its
        teacher, if it has one. `inputs_alone`: return `HeadInputs`, from which the head would compute, with a copy of
        its weight. `kept_head`: the copy that an earlier such pass made, to be used again; None: make one."""
        head = self.lm.get_output_embeddings()
        rows, weight = hidden_states(self.lm, micro).to(head.weight.dtype), head.weight
        if head.bias is not None:
            rows, weight = with_bias(rows, weight, head.bias)
        temperature = temperature or micro.temperature or self.temperature
        divisor, cap = temperature / self.logits.scale, self.logits.cap and self.logits.cap / temperature
        if inputs_alone:
            kept = weight.clone() if kept_head is None else kept_head  # the head may be sharded again after the pass
            return HeadInputs(rows, kept, divisor, cap)
        scored = score_tokens(rows, weight, micro.targets, divisor, micro.support, self.compiled, self.logit_dtype, cap)
        inputs = HeadInputs(rows, weight, divisor, cap)
        return scored if micro.divergence is None else (*scored, micro.divergence(inputs))

    def compile_layers(self) -> None:
        """Compile the forward pass of each layer in place, except for its attention; sequences of any lengths share
        what has been compiled. To be called before the model is sharded."""
        self.compiled = True
        text_model(self.lm).set_attn_implementation(attention.register(compiled=True))
        for layer in text_model(self.lm).layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)


def hidden_states(lm: nn.Module, micro: MicroBatch) -> Tensor:
    """Last hidden states of the positions that predict the targets of `micro`, [K, D]."""
    inputs = {"position_ids": micro.positions} | (micro.images.inputs() if micro.images else {})
    hidden = lm.base_model(
        input_ids=micro.ids, attention_mask=None, use_cache=False, packing=micro.packing, **inputs
    ).last_hidden_state
    return hidden[0, micro.target_rows]


def load(folder: Path, temperature: float, recompute: bool = False) -> Policy:
    """The policy of a Hugging Face folder, unsharded, in fp32 on the CPU; parameters as for `empty_policy`."""
    policy = empty_policy(folder, temperature, recompute)
    load_weights(policy.lm, folder)
    return policy


def load_sharded(policy: Model, folder: Path, device: torch.device, bf16: bool = False, trained: bool = True) -> Model:
    """Shard a model whose parameters have no memory yet, and load each rank's rows from the folder. `bf16`, `trained`:
    as for `shard`. Collective."""
    shard(policy, device, bf16, trained)
    load_weights(policy.lm, folder)
    policy.to(device)
    return policy


def empty_policy(folder: Path, temperature: float, recompute: bool = False) -> Policy:
    """The policy of a Hugging Face folder with parameters on the meta device. Raises ModelError for a head or layers
    that the learner does not support.

    `temperature`: sampling temperature under which the policy scores tokens. With `recompute`, the backward pass
    recomputes a layer's activations instead of keeping them.
    """
    lm = empty_model(folder, attention.register(), recompute=recompute)
    if not hasattr(body := text_model(lm), "layers"):
        raise ModelError(f"{folder}: {type(body).__name__} has no list `layers` to shard")
    return Policy(lm, temperature, logit_map(lm, folder)).train()


def shard(policy: Model, device: torch.device, bf16: bool = False, trained: bool = True) -> Model:
    """Shard over all ranks in place with FSDP2: each layer, then the rest as one group. Collective.

    Gradients are summed over ranks. Master weights are fp32; with `bf16` passes use bfloat16, and gradients are reduced
    in fp32. A model that is not `trained` has no backward pass after which FSDP would reshard the last group, so it is
    resharded after the forward pass.
    """
    options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if not trained:
        options["reshard_after_forward"] = True
    computed = torch.bfloat16 if bf16 else torch.float32
    if bf16 or any(parameter.dtype == torch.bfloat16 for parameter in policy.parameters()):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    choose_experts_implementation(policy.lm, computed)
    for layer in [*text_model(policy.lm).layers, *tower_blocks(policy.lm)]:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if dist.get_world_size() > 1:  # one rank would copy its gradients to divide them by 1
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return policy


def choose_experts_implementation(lm: nn.Module, dtype: torch.dtype) -> None:
    """Have `lm` compute its experts one after the other if torch's grouped matrix product does not support their sizes
    in `dtype`."""
    sizes = [size for name, each in lm.named_parameters() if ".experts." in name for size in each.shape[1:]]
    if any(size * dtype.itemsize % GROUPED_BYTES for size in sizes):
        lm.set_experts_implementation("eager")


def gather_state(
    lm: nn.Module, tensors: Iterable[tuple[str, DTensor]], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Gather `tensors`, the weights of `lm` by its names, and its buffers, on the CPU of rank 0 by Hugging Face name;
    {} on other ranks. Collective.

    `dtype` as in `gather_tensors`. A head tied to the embedding is left out.
    """
    state = gather_tensors(tensors, dtype)
    if dist.get_rank() != 0:
        return {}
    return hugging_face_state(lm, state)


def hugging_face_state(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` and the persistent buffers of `lm`, by the names in Hugging Face files."""
    state |= {name: value.cpu().clone() for name, value in persistent_buffers(lm)}
    return dict(revert_weight_conversion(lm, state))


def gather_tensors(
    parameters: Iterable[tuple[str, DTensor]], dtype: torch.dtype | None = None, to: int = 0
) -> dict[str, Tensor]:
    """Gather sharded parameters on the CPU of rank `to`; {} on other ranks. Collective.

    Tensors are converted to `dtype` before they are sent (None: not converted). The ranks that hold shards of a
    parameter send them; rank `to` must be one of these ranks.
    """
    state = {}
    for bucket in buckets(parameters, dtype):
        group = shard_group(bucket[0][1])
        if to in dist.get_process_group_ranks(group):
            state.update(gather_bucket(bucket, dtype, group, to))
    await_copies()
    return state


def buckets(
    parameters: Iterable[tuple[str, DTensor]], dtype: torch.dtype | None
) -> Iterator[list[tuple[str, DTensor]]]:
    """Consecutive parameters of one dtype and device mesh, in buckets of at most `BUCKET_BYTES` or one parameter."""
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, parameter in parameters:
        parameter_bytes = parameter.numel() * (dtype or parameter.dtype).itemsize
        differs = bucket and (
            parameter.device_mesh != bucket[0][1].device_mesh
            or (dtype is None and parameter.dtype != bucket[0][1].dtype)
        )
        if bucket and (differs or size + parameter_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += parameter_bytes
    if bucket:
        yield bucket


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Process group of the ranks that hold shards of a parameter: the last dimension of its mesh. Other ranks may hold
    replicas."""
    return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)


def gather_bucket(
    bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None, group: dist.ProcessGroup, to: int = 0
) -> dict[str, Tensor]:
    """Unsharded parameters on rank `to`, as `on_cpu` gives them, {} on other ranks. Of n rows (or columns) sharded over
    R ranks, rank r holds the r-th `ceil(n / R)`. Collective."""
    ranks, leader = dist.get_world_size(group), dist.get_rank() == to
    local = torch.cat([parameter.to_local().detach().flatten() for _, parameter in bucket]).to(dtype)
    shapes = [
        [shard_shape(parameter.shape, sharded_dim(parameter), rank, ranks) for rank in range(ranks)]
        for _, parameter in bucket
    ]
    sent = nn.functional.pad(local, (0, sum(math.prod(parts[0]) for parts in shapes) - len(local)))
    if ranks == 1:
        shards = [on_cpu(sent)]
    else:
        shards = [torch.empty_like(sent) for _ in range(ranks)] if leader else []
        dist.gather(sent, shards or None, dst=to, group=group)
    if not leader:
        return {}
    used, full = [0] * ranks, {}
    for (name, parameter), rank_shapes in zip(bucket, shapes, strict=True):
        parts = []
        for rank, (data, shape) in enumerate(zip(shards, rank_shapes, strict=True)):
            length = math.prod(shape)
            parts.append(data[used[rank] : used[rank] + length].view(shape))
            used[rank] += length
        dim = sharded_dim(parameter)
        full[name] = on_cpu(parts[0] if dim is None or ranks == 1 else torch.cat(parts, dim))
    return full


def on_cpu(tensor: Tensor) -> Tensor:
    """The tensor on the CPU. From an accelerator it is copied in the background into page-locked memory, which torch
    reuses once it is free; the values are valid after `await_copies`."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def await_copies(devices: Iterable[torch.device | None] = (None,)) -> None:
    """Wait for the copies between these accelerators (None: this thread's current one) and page-locked memory that this
    thread has started."""
    if torch.cuda.is_initialized():
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def sharded_dim(parameter: DTensor) -> int | None:
    """Dimension along which a parameter is sharded over the last dimension of its mesh; None if it is replicated."""
    placement = parameter.placements[-1]
    return placement.dim if placement.is_shard() else None


def shard_shape(shape: Sequence[int], dim: int | None, rank: int, ranks: int) -> list[int]:
    """Shape of rank `rank`'s shard of a tensor of `shape` that is sharded along `dim` over `ranks` ranks (`dim` None:
    replicated)."""
    own = list(shape)
    if dim is not None:
        each = -(-shape[dim] // ranks)
        own[dim] = max(0, min(each, shape[dim] - rank * each))
    return own


def uses_bf16(section: LearnerSection, device: torch.device) -> bool:
    return section.compute == "bf16" or (section.compute == "auto" and device.type != "cpu")
