"""The trained policy: a Hugging Face causal LM that scores packed responses, sharded with FSDP2."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from april.config import LearnerSection
from april.learner import attention
from april.learner.loading import LogitMap, ModelError, empty_model, load_weights, logit_map, persistent_buffers
from april.learner.packing import MicroBatch, PackedSupport
from april.learner.vision import text_model, tower_blocks

LOGITS_PER_CHUNK = 2**24
"""Most logits that the head computes at once on a CPU (64 MiB in fp32); more tokens are scored in chunks."""
LOGITS_PER_ACCELERATOR_CHUNK = 2**27
"""The same on an accelerator (512 MiB), whose matrix units want many rows; counted in `april/launch/memory.py`."""
ROWS_OF_CHUNK = 128
"""The tokens of an accelerator's chunk are a multiple of this: whole tiles of its matrix products."""
BUCKET_BYTES = 16 * 2**20
"""Bytes gathered to rank 0 at a time; the fastest size measured on gloo."""
GROUPED_BYTES = 16
"""Alignment that matrix products on accelerators want of the rows of each factor, and grouped ones require, bytes."""

Model = TypeVar("Model", bound=nn.Module)
"""A module with a language model, or the body of one, as attribute `lm`."""


class ScoreTokens(torch.autograd.Function):
    """Autograd function of `score_tokens`. With more than one chunk, the backward pass recomputes the logits.

    With supports (truncated sampling), a logit's column is an index into the target's support instead of a token id;
    these log-probabilities take little memory and are kept for the backward pass. With `compiled`, `scores_of` and
    `gradient_of` run over the logits of a chunk, which are then never kept.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, rows_per_chunk, support, compiled, logit_dtype, cap):
        target_logits, logprobs, entropies = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        chunks = LogitChunks(hidden, weight, temperature, rows_per_chunk, logit_dtype, cap)
        columns = support.positions if support else targets
        whole = None if support or compiled else torch.empty_like(chunks.buffer)
        kept = []
        for rows, logits in chunks:
            if compiled:
                target_logits[rows], logprobs[rows], entropies[rows] = fused(scores_of)(logits, columns[rows, None])
                continue
            if support:
                logits = support.select(logits, rows)
            indices = columns[rows, None]
            target_logits[rows] = logits.gather(-1, indices)[:, 0]
            log_p = torch.log_softmax(logits, -1, out=None if whole is None else whole[: len(logits)])
            logprobs[rows] = log_p.gather(-1, indices)[:, 0]
            entropies[rows] = -row_products(torch.exp(log_p, out=logits), log_p)
            if support or len(hidden) <= rows_per_chunk:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, columns, target_logits - logprobs, entropies, *kept)
        ctx.temperature, ctx.rows_per_chunk, ctx.support = temperature, rows_per_chunk, support
        ctx.compiled, ctx.cap = compiled, cap
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing
        return logprobs, entropies

    @staticmethod
    def backward(ctx, logprob_gradients, entropy_gradients):
        """With p = softmax(z), z = logits / temperature: d logprob / dz = onehot - p, dH / dz = -p (log p + H).
        A soft cap c, z = c tanh(x / c) with x = logits / temperature, multiplies these by 1 - (z / c)^2."""
        hidden, weight, columns, normalisers, entropies, *kept = ctx.saved_tensors
        if logprob_gradients is None:
            logprob_gradients = torch.zeros_like(normalisers)
        if kept:
            starts = range(0, len(hidden), ctx.rows_per_chunk)
            log_ps = ((slice(start, start + len(log_p)), log_p) for start, log_p in zip(starts, kept, strict=True))
        else:
            chunks = LogitChunks(hidden, weight, ctx.temperature, ctx.rows_per_chunk, cap=ctx.cap)
            log_ps = (
                (rows, logits if ctx.compiled else logits.sub_(normalisers[rows, None])) for rows, logits in chunks
            )
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows, log_p in log_ps:
            logprob_gradient, factors = logprob_gradients[rows, None], None
            entropy_gradient = None if entropy_gradients is None else entropy_gradients[rows, None]
            if ctx.compiled:
                scales = [normalisers[rows, None], entropies[rows, None], logprob_gradient, entropy_gradient]
                options = (ctx.temperature, hidden.dtype, ctx.cap)
                gradient = fused(gradient_of)(log_p, columns[rows, None], *scales, *options)
            else:
                slope = None if ctx.cap is None else slope_of(log_p + normalisers[rows, None], ctx.cap)
                if entropy_gradient is None:  # the rows are scaled where they are short: hidden states, not logits
                    gradient, factors = log_p.exp_(), -logprob_gradient / ctx.temperature
                    gradient.scatter_add_(1, columns[rows, None], torch.full_like(logprob_gradient, -1.0))
                else:
                    factor = (log_p + entropies[rows, None]).mul_(-entropy_gradient).sub_(logprob_gradient)
                    gradient = log_p.exp_().mul_(factor).scatter_add_(1, columns[rows, None], logprob_gradient)
                    if ctx.temperature != 1:
                        gradient.div_(ctx.temperature)
                if slope is not None:
                    gradient.mul_(slope)
                if ctx.support:
                    gradient = ctx.support.spread(gradient, rows, len(weight))
                gradient = gradient.to(hidden.dtype)
            inputs, outputs = hidden[rows], hidden_gradient[rows]
            torch.mm(gradient, weight, out=outputs)
            if factors is not None:
                inputs = (inputs * factors).to(hidden.dtype)
                outputs.copy_(outputs * factors)
            if weight_gradient is not None:
                add_matmul(weight_gradient, gradient.T, inputs)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None, None, None, None


def slope_of(logits: Tensor, cap: float) -> Tensor:
    """Derivative of c tanh(x / c) by x for soft cap c, from its values; 0 for the padding of supports."""
    return (logits / cap).clamp_(-1, 1).square_().neg_().add_(1)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each row of two matrices [n, V], [n], without their elementwise product in memory."""
    return torch.bmm(left[:, None], right[:, :, None])[:, 0, 0]


def scores_of(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logit, log-probability and entropy of each row of logits [n, V] at its column; `columns` int64 [n, 1], results
    [n]."""
    log_p = torch.log_softmax(logits, -1)
    found = logits.gather(-1, columns)[:, 0], log_p.gather(-1, columns)[:, 0]
    return *found, -(log_p.exp() * log_p).sum(-1)


def gradient_of(
    logits: Tensor,
    columns: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    logprob_gradients: Tensor,
    entropy_gradients: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
    cap: float | None,
) -> Tensor:
    """Gradient of logits [n, V] before the division by `temperature` and the soft cap, from those of log-probability
    and entropy, [n, 1] each."""
    log_p = logits - normalisers
    factor = -logprob_gradients
    if entropy_gradients is not None:
        factor = factor - entropy_gradients * (log_p + entropies)
    at_target = torch.arange(logits.shape[1], device=logits.device) == columns
    gradient = (log_p.exp() * factor + torch.where(at_target, logprob_gradients, 0.0)) / temperature
    return (gradient if cap is None else gradient * slope_of(logits, cap)).to(dtype)


@cache
def fused(function: Callable) -> Callable:
    """`function`, compiled on its first call to one pass or few over its inputs, of any number of rows."""
    return torch.compile(function, dynamic=True)


class LogitChunks:
    """Iterates over (rows, fp32 logits / temperature, softly capped) of a head, in one buffer that each chunk
    overwrites.

    16-bit inputs are multiplied with fp32 accumulation and fp32 results: rounding a logit of 20 to bfloat16 would move
    it by 0.06.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        temperature: float,
        rows_per_chunk: int,
        logit_dtype: torch.dtype = torch.float32,
        cap: float | None = None,
    ):
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        self.logit_dtype, self.cap = logit_dtype, cap
        self.rows_per_chunk = min(rows_per_chunk, max(1, len(hidden)))
        self.buffer = torch.empty(self.rows_per_chunk, len(weight), dtype=torch.float32, device=hidden.device)
        if weight.device.type == "cpu":
            self.weight = weight.float()

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, len(self.hidden), self.rows_per_chunk):
            part = self.hidden[start : start + self.rows_per_chunk]
            logits = self.buffer[: len(part)]
            if self.weight.dtype == torch.float32:
                torch.mm(part.float(), self.weight.T, out=logits)
            else:
                torch.mm(part, self.weight.T, out_dtype=torch.float32, out=logits)
            if self.logit_dtype != torch.float32:
                logits.copy_(logits.to(self.logit_dtype))
            if self.temperature != 1:
                logits.div_(self.temperature)
            if self.cap is not None:
                logits.div_(self.cap).tanh_().mul_(self.cap)
            yield slice(start, start + len(part)), logits


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in fp32; `total` is fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.device.type == "cpu":
        total.addmm_(left.float(), right.float())
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, out_dtype=torch.float32, out=total)


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    support: PackedSupport | None = None,
    compiled: bool = False,
    logit_dtype: torch.dtype = torch.float32,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) under softmax(z), z = hidden weight^T / temperature, or with a
    soft cap softmax(cap tanh(z / cap)), renormalised over the target's support if there are supports.

    hidden [K, D], weight [V, D], targets int64 [K] -> float32 [K], [K]; both are differentiable, with one backward pass
    per call. At most `LOGITS_PER_CHUNK` logits exist at a time (on an accelerator `LOGITS_PER_ACCELERATOR_CHUNK`), in
    two copies; if one chunk holds all, it is kept for the backward pass. `compiled`: passes over whole logits are
    compiled. `logit_dtype`: type to which logits are rounded; without gradients only.
    """
    if hidden.device.type == "cpu":
        rows_per_chunk = max(1, LOGITS_PER_CHUNK // len(weight))
    else:
        rows_per_chunk = ROWS_OF_CHUNK * max(1, LOGITS_PER_ACCELERATOR_CHUNK // len(weight) // ROWS_OF_CHUNK)
    return ScoreTokens.apply(
        hidden, weight, targets, temperature, rows_per_chunk, support, compiled and support is None, logit_dtype, cap
    )


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

    def forward(self, micro: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of each target of `micro`, float32 [K] each, over its support if there is one, at
        the policy's sampling temperature unless another is given."""
        head = self.lm.get_output_embeddings()
        rows, weight = hidden_states(self.lm, micro).to(head.weight.dtype), head.weight
        if head.bias is not None:
            rows, weight = with_bias(rows, weight, head.bias)
        temperature = temperature or self.temperature
        divisor, cap = temperature / self.logits.scale, self.logits.cap and self.logits.cap / temperature
        return score_tokens(rows, weight, micro.targets, divisor, micro.support, self.compiled, self.logit_dtype, cap)

    def compile_layers(self) -> None:
        """Compile the forward pass of each layer in place, except for its attention; sequences of any lengths share
        what has been compiled. To be called before the model is sharded."""
        self.compiled = True
        text_model(self.lm).set_attn_implementation(attention.register(compiled=True))
        for layer in text_model(self.lm).layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)


def with_bias(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and a head without bias with the same products, [K, D'] and [V, D']: the bias is one more column,
    of a feature that is 1, and zeros fill the rows to whole `GROUPED_BYTES`."""
    columns = GROUPED_BYTES // weight.element_size()
    ones = hidden.new_zeros(len(hidden), columns)
    ones[:, 0] = 1
    return torch.cat([hidden, ones], 1), torch.cat([weight, F.pad(bias[:, None], (0, columns - 1))], 1)


def hidden_states(lm: nn.Module, micro: MicroBatch) -> Tensor:
    """Last hidden states of the positions that predict the targets of `micro`, [K, D]."""
    inputs = {"position_ids": micro.positions} | (micro.images.inputs() if micro.images else {})
    hidden = lm.base_model(
        input_ids=micro.ids, attention_mask=None, use_cache=False, packing=micro.packing, **inputs
    ).last_hidden_state
    return hidden[0, micro.target_rows]


def load(folder: Path, temperature: float, recompute: bool = False) -> Policy:
    """Load a Hugging Face folder unsharded, in fp32 on the CPU."""
    policy = empty_policy(folder, temperature, recompute)
    load_weights(policy.lm, folder)
    return policy


def load_sharded(policy: Model, folder: Path, device: torch.device, bf16: bool = False, trained: bool = True) -> Model:
    """Shard a model whose parameters have no memory yet (see `shard`), and load each rank's rows from the folder.
    Collective."""
    shard(policy, device, bf16, trained)
    load_weights(policy.lm, folder)
    policy.to(device)
    return policy


def empty_policy(folder: Path, temperature: float, recompute: bool = False) -> Policy:
    """The policy of a Hugging Face folder with parameters on the meta device. Raises ModelError for a head or layers
    that the learner does not support.

    With `recompute`, the backward pass recomputes a layer's activations instead of keeping them.
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
    """Compute experts one after the other if torch's grouped matrix product does not support their sizes."""
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
    """A tensor on the CPU. An accelerator's comes into page-locked memory, which torch uses again once it is free. It
    is there after `await_copies`."""
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
