"""The frozen weights under an adapter in fewer bytes: bfloat16, or NF4 for the layers' matrices (QLoRA, arXiv
2305.14314, section 3).

A matrix in NF4 is one tensor of bytes, each row by itself, so that it is sharded by rows as any other: first two values
a byte, then the fp32 scales of each 64 values. A product unpacks the matrix, in both passes, and keeps the packed one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from april.learner.vision import text_model

BLOCK = 64
"""Number of consecutive values of a row that share a scale."""
SCALE_BYTES = 4


class BaseLinear(nn.Linear):
    """Linear layer whose weight is a matrix, or bytes as `pack` makes them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_floating_point():
            return super().forward(x)
        product = PackedProduct.apply(x, self.weight, self.in_features)
        return product if self.bias is None else product + self.bias

    def plain_weight(self) -> Tensor:
        """The weight [out, in] in fp32, detached from autograd and sharded as the held weight is."""
        return self.with_rows(self.plain_rows(slice(None)))

    def plain_rows(self, rows: slice) -> Tensor:
        """The rows `rows`, [n, in], of this rank's shard of the weight, in fp32 and detached from autograd."""
        held = local_part(self.weight)[rows]
        return held.float() if held.is_floating_point() else unpack(held, self.in_features)

    def with_rows(self, rows: Tensor) -> Tensor:
        """The tensor [out, in] of which this rank has `rows`, sharded as the weight is."""
        held, shape = self.weight, torch.Size([len(self.weight), self.in_features])
        if not isinstance(held, DTensor):
            return rows
        return DTensor.from_local(
            rows, held.device_mesh, held.placements, run_check=False, shape=shape, stride=(self.in_features, 1)
        )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, detached from autograd."""
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


class PackedProduct(torch.autograd.Function):
    """x W^T for a packed W [out, in]; x [..., in] -> [..., out]. W has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, columns: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.columns = columns
        return F.linear(x, unpack(packed, columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, ctx.columns, gradient.dtype), None, None


def hold_frozen(lm: nn.Module, form: str) -> None:
    """Change the frozen parameters of `lm`, which are on the meta device, in place to `form`, a value of `lora.base`:
    "fp32" changes nothing. With "nf4", linear layers of the decoder layers are held in NF4 if their rows are whole
    blocks, and all other frozen parameters in bfloat16."""
    if form == "fp32":
        return
    for module in text_model(lm).layers.modules() if form == "nf4" else ():
        if type(module) is nn.Linear and not module.weight.requires_grad and module.in_features % BLOCK == 0:
            module.__class__ = BaseLinear
            size = packed_columns(module.in_features)
            packed = torch.empty(module.out_features, size, dtype=torch.uint8, device="meta")
            module.weight = nn.Parameter(packed, requires_grad=False)
    in_bf16(parameter for parameter in lm.parameters() if not parameter.requires_grad)


def in_bf16(parameters: Iterable[nn.Parameter]) -> None:
    """Hold parameters of floating-point numbers in bfloat16, in place."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def packed_columns(columns: int) -> int:
    """Number of bytes of a row of `columns` values that is packed in NF4: the values, two a byte, and their scales."""
    return columns // 2 + columns // BLOCK * SCALE_BYTES


def pack(values: Tensor) -> Tensor:
    """A matrix [n, in] in NF4, uint8 [n, `packed_columns(in)`]."""
    from bitsandbytes.functional import quantize_4bit

    rows, columns = values.shape
    if not rows:
        return torch.empty(0, packed_columns(columns), dtype=torch.uint8, device=values.device)
    codes, state = quantize_4bit(values.contiguous(), blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.float().view(rows, -1).view(torch.uint8)
    return torch.cat([codes.view(rows, -1), scales], 1)


def unpack(packed: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack`, up to its rounding: the matrix [n, `columns`]."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    rows = len(packed)
    if not rows:
        return torch.empty(0, columns, dtype=dtype, device=packed.device)
    codes, scales = packed[:, : columns // 2].reshape(-1, 1), packed[:, columns // 2 :].contiguous().view(torch.float32)
    code = get_4bit_type("nf4", device=packed.device, blocksize=BLOCK)
    shape = torch.Size([rows, columns])
    state = QuantState(scales.flatten(), shape=shape, code=code, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    return dequantize_4bit(codes, state)


def shape_in_files(lm: nn.Module, name: str, held: Tensor) -> Sequence[int]:
    """Shape that the parameter `name` of `lm` has in files. `held`: the parameter in memory, whose shape differs if it
    is packed in NF4."""
    module = lm.get_submodule(name.rpartition(".")[0])
    is_packed = isinstance(module, BaseLinear) and held.dtype == torch.uint8
    return (len(held), module.in_features) if is_packed else tuple(held.shape)
