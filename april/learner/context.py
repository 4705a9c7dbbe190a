"""Context parallelism: the ranks of a context group share each packed row.

Each of the C ranks computes an equal number of the row's tokens everywhere but in attention. There one all-to-all
exchanges tokens for heads, so that a rank sees whole sequences for its part of the heads, and another one exchanges
them back (DeepSpeed Ulysses, arXiv 2309.14509). What a model returns for its targets is put together on all C ranks, so
that losses, corrections and metrics are computed on whole sequences.

ranks, context = context_groups(section)
context.divide(model)       # after sharding; its inputs and outputs stay those of the undivided model
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from april.config import LearnerSection
from april.learner.attention_kernels import Exchange
from april.learner.head_divergence import TopKDivergence
from april.learner.loading import ModelError
from april.learner.losses.ranks import Ranks
from april.learner.mixers import mixers_in
from april.learner.packing import HeadInputs, MicroBatch
from april.learner.vision import text_model, tower


def context_groups(section: LearnerSection) -> "tuple[Ranks, ContextGroup | None]":
    """Collectives of the ranks among which a batch is divided, and this rank's context group, None if
    `learner.context_parallel` is 1. Ranks are a mesh of data x context: those of a context group follow each other.
    Collective."""
    size, count = section.context_parallel, dist.get_world_size()
    if size == 1:
        return Ranks(), None
    mesh, timeout = torch.arange(count).view(-1, size), timedelta(seconds=section.collective_timeout_s)
    data, _ = dist.new_subgroups_by_enumeration(mesh.T.tolist(), timeout=timeout)
    context, _ = dist.new_subgroups_by_enumeration(mesh.tolist(), timeout=timeout)
    return Ranks(data), ContextGroup(size, dist.get_rank() % size, context)


def objection_to_sharing(lm: nn.Module, size: int) -> str:
    """The reason why `size` ranks cannot share the packed rows of a model (context parallelism), and what to do about
    it; empty if none is found. It is worded to follow the words "learner.context_parallel = `size`"."""
    if size == 1:
        return ""
    if tower(lm):
        return "is not for a model that sees images, whose tokens one rank computes; set it to 1"
    if mixers := {type(mixer).__name__ for layer in text_model(lm).layers for mixer in mixers_in(layer)}:
        return f"is not for {', '.join(sorted(mixers))}, which takes a sequence as a whole; set it to 1"
    if not (heads := query_heads(lm.config)):
        return "is not for a model whose config.json does not say its number of attention heads; set it to 1"
    if wrong := [count for count in heads if count % size]:
        return f"does not divide the model's {wrong[0]} heads of queries; use a divisor of them"
    return ""


def query_heads(config: PreTrainedConfig) -> list[int]:
    """The different numbers of query heads that the model's layers have, ascending; empty if unknown."""
    found = getattr(config.get_text_config(), "num_attention_heads", None) or []
    return sorted({found} if isinstance(found, int) else set(found))


def check_sharing(lm: nn.Module, size: int) -> None:
    """Raises ModelError if `size` ranks cannot share the packed rows of a model (context parallelism)."""
    if said := objection_to_sharing(lm, size):
        raise ModelError(f"learner.context_parallel = {size} {said}")


class ContextGroup:
    """The ranks among which the tokens of each packed row are divided: `size` of them, of which this one is `rank`.
    `group`: their process group."""

    def __init__(self, size: int, rank: int, group: dist.ProcessGroup | None):
        self.size, self.rank, self.group = size, rank, group

    def all_to_all(self, sent: Tensor) -> Tensor:
        """[C, n] -> [C, n], C the number of ranks of the group: row r of `sent` goes to rank r; row r of the result
        comes from rank r. Collective."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks of the group, in place and the same on each. Collective."""
        dist.all_reduce(values, group=self.group)
        return values

    def divide(self, model: nn.Module) -> nn.Module:
        """Change a model, in place, so that a call with a micro-batch computes this rank's tokens alone, but still
        returns columns [K] of all targets of the micro-batch. A call that asks for `HeadInputs` gets those of this
        rank's targets alone."""

        def hook(module: nn.Module, arguments: tuple[MicroBatch, ...], found: Any) -> Any:
            return found if isinstance(found, HeadInputs) else self.whole(arguments[0], found)

        model.register_forward_pre_hook(lambda module, arguments: (self.part(arguments[0]), *arguments[1:]))
        model.register_forward_hook(hook)
        return model

    def whole(self, part: MicroBatch, columns: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Columns [K] of all targets of a row. `columns`: those of this rank's targets, in its `part` of the row.
        Collective."""
        assert isinstance(part.exchange, RowExchange), "the micro-batch is no part of a row"
        if isinstance(columns, Tensor):
            return WholeColumns.apply(part.exchange, columns)[0]
        return WholeColumns.apply(part.exchange, *columns)

    def part(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch, and the targets that they predict. `seq_lens` and `cu_seq_lens` of the
        result are those of the whole row, padded by a last sequence of up to C - 1 tokens, so that C, the number of
        ranks of the group, divides its length."""
        lengths, padding = micro.seq_lens, -sum(micro.seq_lens) % self.size
        ids, positions, starts, compared = micro.ids, micro.positions, micro.cu_seq_lens, micro.divergence
        if padding:
            lengths, starts = [*lengths, padding], torch.cat([starts, starts[-1:] + padding])
            ids = F.pad(ids, (0, padding))
            positions = torch.cat([positions, torch.arange(padding, device=ids.device)[None]], 1)
        each = sum(lengths) // self.size
        tokens = slice(self.rank * each, (self.rank + 1) * each)
        ends = torch.tensor([tokens.start, tokens.stop], device=ids.device)
        targets = slice(*torch.searchsorted(micro.target_rows, ends).tolist())
        return replace(
            micro,
            ids=ids[:, tokens],
            positions=positions[:, tokens],
            seq_lens=lengths,
            cu_seq_lens=starts,
            target_rows=micro.target_rows[targets] - tokens.start,
            targets=micro.targets[targets],
            support=micro.support and micro.support.part(targets),
            divergence=compared.part(targets) if isinstance(compared, TopKDivergence) else compared,
            exchange=RowExchange(self, targets, len(micro.targets)),
        )


@dataclass(frozen=True, eq=False)
class RowExchange(Exchange):
    """Exchange between the ranks of a context group in a pass over one row."""

    context: ContextGroup
    targets: slice
    """This rank's targets among those of the row."""
    count: int
    """K, the number of targets of the row."""

    @property
    def ranks(self) -> int:
        return self.context.size

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        size, rows = self.context.size, [split_heads(each, self.context.size) for each in tensors]
        received = AllToAll.apply(torch.cat([row.flatten(1) for row in rows], 1), self.context)
        parts = received.split([row[0].numel() for row in rows], 1)
        return tuple(
            part.view(size, *row.shape[1:]).transpose(0, 1).flatten(1, 2)[None]
            for part, row in zip(parts, rows, strict=True)
        )

    def to_tokens(self, output: Tensor) -> Tensor:
        parts = output[0].unflatten(0, (self.context.size, -1))
        received = AllToAll.apply(parts.flatten(1), self.context).view(parts.shape)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def of_heads(self, values: Tensor) -> Tensor:
        return values.chunk(self.context.size)[self.context.rank]


def split_heads(tensor: Tensor, size: int) -> Tensor:
    """Divide the H heads of a layer among C = `size` ranks: [1, H, T, D] -> [C, H / C, T, D]. If C does not divide the
    number of heads of keys and values, they are repeated, so that each rank has those of its queries."""
    repeats = size // gcd(size, tensor.shape[1])
    heads = tensor[0] if repeats == 1 else tensor[0].repeat_interleave(repeats, 0)
    return heads.unflatten(0, (size, -1))


class AllToAll(torch.autograd.Function):
    """`ContextGroup.all_to_all` as a step of autograd: row r goes to rank r; backward, gradients are exchanged in the
    same way."""

    @staticmethod
    def forward(ctx, sent, context):
        ctx.context = context
        return context.all_to_all(sent.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.context.all_to_all(gradient.contiguous()), None


class WholeColumns(torch.autograd.Function):
    """Puts the columns of all ranks' targets together: each rank gives those of its own targets, and gets those of all
    K targets of the row. Backward, a rank keeps the gradient of its own targets: every rank computes the loss of the
    whole row, and parameters' gradients are summed over all ranks."""

    @staticmethod
    def forward(ctx, exchange, *columns):
        ctx.targets = exchange.targets
        ctx.set_materialize_grads(False)
        whole = columns[0].new_zeros(len(columns), exchange.count)
        whole[:, exchange.targets] = torch.stack(columns)
        return tuple(column.clone() for column in exchange.context.total(whole))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *(gradient if gradient is None else gradient[ctx.targets] for gradient in gradients)
