"""Checks and times of kernels that the learner calls on a card, or could call there."""

import time
from functools import partial

import numpy as np
import torch
from part import Part

from april.learner import attention


def check_kernels(part: Part) -> None:
    """Whether kernels do on the card what the learner calls them for: attention, and a matrix product that is added in
    fp32."""
    with part.attempt("attention"):
        check_attention(part)
    if part.device.type == "cuda":  # a CPU has no such product
        with part.attempt("addmm in fp32"):
            check_addmm(part)


def check_attention(part: Part) -> None:
    """The learner's attention, in one call and by sequence, against one in fp32."""
    lengths, device = [30, 1, 7] if part.tiny else [3000, 1, 70, 1025], part.device
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(1, heads, sum(lengths), 128, device=device) for heads in (16, 8, 8))
    weights = torch.randn(1, sum(lengths), 16, 128, device=device)

    def results(attend, dtype):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        output = attend(*inputs)
        (output.float() * weights).sum().backward()
        return [output, *(tensor.grad for tensor in inputs)]

    exact = results(lambda *inputs: attention.each_sequence(*inputs, lengths, None), torch.float32)
    ways = {
        "as the learner calls it": lambda *inputs: attention.variable_length(*inputs, starts, max(lengths), None),
        "by sequence": lambda *inputs: attention.each_sequence(*inputs, lengths, None),
    }
    if device.type == "cpu":
        ways = {"by sequence": ways["by sequence"]}
    for name, way in ways.items():
        with part.attempt(f"attention {name}"):
            found = results(way, torch.bfloat16)
            errors = [
                ((one.float() - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)
            ]
            part.fact(f"attention {name}: relative errors of output and gradients", [f"{each:.1e}" for each in errors])


def check_addmm(part: Part) -> None:
    """total += left @ right of bf16 factors in fp32, by a product that is added, and in one call."""
    rows, vocabulary, width = 768, 151_936, 2048
    total = torch.randn(vocabulary, width, device=part.device)
    left = torch.randn(rows, vocabulary, device=part.device, dtype=torch.bfloat16).T
    right = torch.randn(rows, width, device=part.device, dtype=torch.bfloat16)
    expected = total + torch.mm(left, right, out_dtype=torch.float32)
    one_call = partial(torch.ops.aten.addmm.dtype_out, out_dtype=torch.float32)
    found = total.clone()
    one_call(found, left, right, out=found)
    part.fact("addmm in fp32: relative error", f"{((found - expected).norm() / expected.norm()).item():.1e}")
    for name, way in {
        "product, then sum": lambda: total.add_(torch.mm(left, right, out_dtype=torch.float32)),
        "one call": lambda: one_call(total, left, right, out=total),
    }.items():
        way()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            way()
        torch.cuda.synchronize()
        part.fact(f"addmm in fp32, {name}: ms", round((time.perf_counter() - began) * 100, 2))
