"""A Hugging Face model as Megatron's `GPTModel`, with packed attention and a head that scores tokens.

The layers follow Megatron's local specification, which runs on any device. Attention, rotary embedding and head are
April's, since Megatron's need an accelerator or do not support packed sequences.

With experts, the tensor-parallel ranks divide the tokens everywhere but in attention (sequence parallelism), so that
each token is routed once, on the rank that holds it.

A rank holds the layers of its pipeline stage. The first stage has the embedding, the last the final norm and the head.

Master weights are fp32. With bfloat16, passes use a copy that is rounded anew after each update, and its gradients are
accumulated in fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from april.learner.attention import packed_attention
from april.learner.backends.megatron.layout import SHARES, ParallelLayout
from april.learner.backends.megatron.names import (
    check_experts,
    check_stages,
    expert_arguments,
    has_experts,
    mapped_tensors,
    own_rows,
)
from april.learner.head import LOGITS_PER_CHUNK
from april.learner.loading import ModelError, WeightFiles
from april.learner.packing import MicroBatch

# --- head -------------------------------------------------------------------------------------------------------------


class ReduceFromRanks(torch.autograd.Function):
    """Forward: sum over the ranks. Backward: identity, since all ranks use the sum in the same way."""

    @staticmethod
    def forward(ctx, values, group):
        summed = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class CopyToRanks(torch.autograd.Function):
    """Forward: identity. Backward: sum over the ranks, since each rank uses the value in its own way."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    targets: Tensor,
    temperature: float,
    group: dist.ProcessGroup,
    logit_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) under softmax(hidden W^T / temperature), float32 [K] each.

    hidden [K, D] and targets int64 [K] are the same on all ranks of `group`; weight [V / ranks, D] has the rows of W
    from `first` on. At most `LOGITS_PER_CHUNK` logits exist at a time on a rank; with several chunks the backward pass
    recomputes them. `logit_dtype`: type to which logits are rounded. Collective in both passes.
    """
    rows = max(1, LOGITS_PER_CHUNK // len(weight))
    if len(hidden) <= rows:
        return score_rows(hidden, weight, first, targets, temperature, group, logit_dtype)
    chunks = [
        checkpoint(score_rows, *each, use_reentrant=False)
        for start in range(0, len(hidden), rows)
        for own in [slice(start, start + rows)]
        for each in [(hidden[own], weight, first, targets[own], temperature, group, logit_dtype)]
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score_rows(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    targets: Tensor,
    temperature: float,
    group: dist.ProcessGroup,
    logit_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each target, as `score_tokens` and with its parameters, for one chunk of rows of
    `hidden` whose logits exist all at once."""
    logits = (CopyToRanks.apply(hidden.float(), group) @ weight.float().T).to(logit_dtype).float() / temperature
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    normaliser = largest + ReduceFromRanks.apply((logits - largest[:, None]).exp().sum(1), group).log()
    rows = targets - first
    is_local = (rows >= 0) & (rows < len(weight))
    own = logits.gather(1, rows.clamp(0, len(weight) - 1)[:, None])[:, 0]
    logprobs = ReduceFromRanks.apply(own.where(is_local, 0.0), group) - normaliser
    log_p = logits - CopyToRanks.apply(normaliser, group)[:, None]
    entropies = -ReduceFromRanks.apply((log_p.exp() * log_p).sum(1), group)
    return logprobs, entropies


# --- model ------------------------------------------------------------------------------------------------------------

ARCHITECTURES = ("qwen3", "qwen2", "llama", "qwen3_moe")
"""Values of `model_type` in Hugging Face's `config.json` whose layers Megatron computes identically."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with the sequence lengths in tokens that April's attention needs."""

    seq_lens: list[int] = field(default_factory=list)


class PackedAttention(nn.Module):
    """Replaces Megatron's core attention, which does not support packed sequences on a CPU."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused):
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, packed_seq_params: PackedSequences, **unused
    ):
        """Attention within each of the packed sequences, whose lengths are in `packed_seq_params`: query [T, H, D], key
        and value [T, H_kv, D] -> [T, H, D]."""
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        lengths, starts = packed_seq_params.seq_lens, packed_seq_params.cu_seqlens_q
        longest = packed_seq_params.max_seqlen_q
        attended, _ = packed_attention(self, query, key, value, mask, self.scale, 0.0, lengths, starts, longest)
        return attended[0]


class Rotary(nn.Module):
    """Rotary embedding with the frequencies of a Hugging Face model, in Megatron's interface."""

    def __init__(self, frequencies: Tensor):
        super().__init__()
        self.register_buffer("frequencies", frequencies.clone(), persistent=False)

    def get_rotary_seq_len(self, context, transformer, hidden, config, packed: PackedSequences) -> int:
        return packed.max_seqlen_q

    def forward(self, length: int, **unused) -> Tensor:
        """Angles of positions 0 to length - 1, [length, 1, 1, D]; positions restart in each sequence."""
        positions = torch.arange(length, device=self.frequencies.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies)
        return torch.cat([angles, angles], -1)[:, None, None]


class Norm(nn.RMSNorm):
    """RMSNorm that, unlike Megatron's own, accepts sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class Router(TopKRouter):
    """Router with a plain linear gate: Megatron's own needs Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight)


class MegatronPolicy(nn.Module):
    """The part of a policy on this rank, read from a Hugging Face folder; `lm` is that model on the meta device."""

    def __init__(self, lm: nn.Module, folder: Path, temperature: float, layout: ParallelLayout, bf16: bool = False):
        super().__init__()
        mesh, self.shares, self.hidden_size = layout.layers, layout.tensor_parallel, lm.config.hidden_size
        check_model(lm, folder, layout)
        self.model, self.temperature = make_model(lm, layout), temperature
        self.computing = make_model(lm, layout, torch.bfloat16) if bf16 else self.model
        self.logit_dtype = torch.float32
        """Type to which logits are rounded, as in `Policy`."""
        self.divides_tokens = self.model.config.sequence_parallel
        """Whether tensor-parallel ranks divide the tokens, except in attention (sequence parallelism)."""
        self.mapped_tensors = list(mapped_tensors(self.model, lm, layout))
        self.group = mesh.get_group(SHARES)
        vocabulary = lm.get_input_embeddings().weight
        self.own_rows = own_rows(vocabulary, mesh)
        self.first_row = mesh.get_local_rank(SHARES) * -(-len(vocabulary) // mesh[SHARES].size())
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        files = WeightFiles(folder)
        for mapped in self.mapped_tensors:
            mapped.read(files)
        self.round()
        if bf16:
            for rounded, kept in self.rounded():
                rounded.register_post_accumulate_grad_hook(partial(accumulate_gradient, kept))

    def rounded(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of (bfloat16 copy, fp32 master parameter)."""
        return zip(self.computing.parameters(), self.model.parameters(), strict=True)

    @torch.no_grad()
    def round(self) -> None:
        """Round the master weights into the bfloat16 copy; called whenever the weights have changed."""
        if self.computing is not self.model:
            for rounded, kept in self.rounded():
                rounded.copy_(kept)

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """(Megatron name, parameter) of each trained parameter on this rank."""
        return list(self.model.named_parameters())

    def empty_activations(self, micro: MicroBatch) -> Tensor:
        tokens = micro.ids.shape[1]
        if self.divides_tokens:
            tokens = -(-tokens // self.shares)
        dtype = self.computing.config.params_dtype
        return torch.empty(tokens, 1, self.hidden_size, dtype=dtype, device=micro.ids.device)

    def hidden(self, micro: MicroBatch, inputs: Tensor | None) -> Tensor:
        """Output of this stage's layers, [T, 1, D], from the previous stage's output (None on the first stage). With
        sequence parallelism T counts this rank's tokens only."""
        if self.divides_tokens:
            micro = pad_to_multiple(micro, self.shares)
        longest, starts = max(micro.seq_lens), micro.cu_seq_lens
        packed = PackedSequences(
            "thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, seq_lens=micro.seq_lens
        )
        self.computing.set_input_tensor(inputs)
        return self.computing(micro.ids, micro.positions, None, packed_seq_params=packed)

    def score(self, hidden: Tensor, micro: MicroBatch, temperature: float | None) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the K target tokens, float32 [K] each, from the output `hidden` of the last
        layer. `temperature` None: the micro-batch's, or without one the policy's."""
        if self.divides_tokens:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        rows = hidden[:, 0][micro.target_rows]
        shared = self.computing.share_embeddings_and_output_weights
        head = (self.computing.embedding.word_embeddings if shared else self.computing.output_layer).weight
        own = head[: self.own_rows]
        temperature = temperature or micro.temperature or self.temperature
        return score_tokens(rows, own, self.first_row, micro.targets, temperature, self.group, self.logit_dtype)


def accumulate_gradient(kept: nn.Parameter, rounded: nn.Parameter) -> None:
    """Add the gradient of a bfloat16 copy to that of its fp32 master parameter, and free it."""
    assert rounded.grad is not None
    found, rounded.grad = rounded.grad.to(kept.dtype), None
    kept.grad = found if kept.grad is None else kept.grad.add_(found)


def pad_to_multiple(micro: MicroBatch, ranks: int) -> MicroBatch:
    """The micro-batch padded by a sequence without targets, so that its tokens divide evenly among `ranks`."""
    lacking = -micro.ids.shape[1] % ranks
    if not lacking:
        return micro
    blank, starts = torch.arange(lacking, device=micro.ids.device)[None], micro.cu_seq_lens
    return replace(
        micro,
        ids=torch.cat([micro.ids, torch.zeros_like(blank)], 1),
        positions=torch.cat([micro.positions, blank], 1),
        seq_lens=[*micro.seq_lens, lacking],
        cu_seq_lens=torch.cat([starts, starts[-1:] + lacking]),
    )


def check_model(lm: nn.Module, folder: Path, layout: ParallelLayout) -> None:
    """Raises ModelError for a model that Megatron would compute wrongly, or that this layout cannot divide."""
    config, shares = lm.config, layout.tensor_parallel
    if config.model_type not in ARCHITECTURES:
        raise ModelError(
            f"{folder}: Megatron's layers are those of {', '.join(ARCHITECTURES)}, and the model is "
            f"{config.model_type}; use another back end"
        )
    rotary = lm.base_model.rotary_emb
    plain = rotary.attention_scaling == 1 and config.hidden_act == "silu"
    kinds = getattr(config, "layer_types", None)
    windows = set(kinds) - {"full_attention"} if kinds else getattr(config, "sliding_window", None)
    if not plain or windows or not config.num_key_value_heads:
        raise ModelError(
            f"{folder}: its activation, attention or rotary embedding is not one that Megatron's layers have"
        )
    check_stages(lm, folder, layout)
    check_experts(lm, folder, layout)
    with_experts = [has_experts(layer) for layer in lm.base_model.layers]
    sizes = ["num_attention_heads", "num_key_value_heads"]
    if any(with_experts) and layout.splits_experts:
        sizes.append("moe_intermediate_size")
    if not all(with_experts):
        sizes.append("intermediate_size")
    for name in sizes:
        if getattr(config, name) % shares:
            raise ModelError(
                f"{folder}: learner.tensor_parallel = {shares} does not divide its {name} = {getattr(config, name)}"
            )
    if config.vocab_size <= (shares - 1) * -(-config.vocab_size // shares):
        raise ModelError(
            f"{folder}: learner.tensor_parallel = {shares} is too much for a vocabulary of {config.vocab_size}"
        )


def make_model(lm: nn.Module, layout: ParallelLayout, dtype: torch.dtype = torch.float32) -> GPTModel:
    """Megatron's model with the layers of `lm` that are on this rank's stage; its parameters are of type `dtype` and
    have no values yet."""
    config, rotary, shares = lm.config, lm.base_model.rotary_emb, layout.tensor_parallel
    layer = lm.base_model.layers[0]
    has_norms = hasattr(layer.self_attn, "q_norm")
    of_layers = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=2 * len(rotary.inv_freq),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=has_norms,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=layer.self_attn.q_proj.bias is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=shares,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **pipeline_arguments(config.num_hidden_layers, layout),
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **expert_arguments(lm, layout),
    )
    model = GPTModel(
        config=of_layers,
        transformer_layer_spec=layer_spec(lm, of_layers, layout),
        vocab_size=shares * -(-config.vocab_size // shares),
        max_sequence_length=config.max_position_embeddings,
        pre_process=layout.stage == 0,
        post_process=layout.is_last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings and layout.stages == 1,
    )
    model.rotary_pos_emb = Rotary(rotary.inv_freq)
    model.post_process = False  # it returns hidden states, not logits
    return model


def pipeline_arguments(layers: int, layout: ParallelLayout) -> dict[str, Any]:
    """Arguments of a `TransformerConfig` about pipeline stages: the layers of each stage."""
    if layout.stages == 1:
        return {}
    each: list[list[str]] = [["decoder"] * len(layout.stage_layers(layers, stage)) for stage in range(layout.stages)]
    each[0].insert(0, "embedding")
    each[-1].append("loss")
    return {"pipeline_model_parallel_size": layout.stages, "pipeline_model_parallel_layout": each}


def layer_spec(lm: nn.Module, config: TransformerConfig, layout: ParallelLayout) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = Norm
    layers = lm.base_model.layers
    for number, spec in zip(layout.stage_layers(len(layers), layout.stage), block.layer_specs, strict=True):
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if has_experts(layers[number]):
            parts.mlp.submodules.router = Router
    return block
