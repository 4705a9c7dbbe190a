"""Checks and times of kernels that the learner calls on a card, or could call there."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from part import Part
from torch.nn.attention import SDPBackend, sdpa_kernel

from april.learner import attention
from april.learner.head import row_products


def check_kernels(part: Part) -> None:
    """Whether kernels do on the card what the learner calls them for: attention, and a matrix product that is added in
    fp32."""
    with part.attempt("attention"):
        check_attention(part)
    with part.attempt("speed of attention"):
        time_attention(part)
    with part.attempt("products of rows"):
        time_row_products(part)
    if part.device.type == "cuda":  # a CPU has no such product
        with part.attempt("addmm in fp32"):
            check_addmm(part)


def check_attention(part: Part) -> None:
    """The learner's attention, in one call and by sequence, against one in fp32."""
    lengths, device = [30, 1, 7] if part.tiny else [3000, 1, 70, 1025], part.device
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(1, heads, sum(lengths), 128, device=device) for heads in (16, 8, 8))
    weights = torch.randn(1, sum(lengths), 16, 128, device=device)

    def results(attend, dtype, *more):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v, *more)]
        output = attend(*inputs)
        (output.float() * weights).sum().backward()
        return [output, *(tensor.grad for tensor in inputs)]

    exact = results(lambda *inputs: attention.each_sequence(*inputs, lengths, None), torch.float32)
    ways = {
        "by flash-attn-4": lambda *inputs: attention.flash_attention_4(*inputs, starts, max(lengths), None),
        "by PyTorch": lambda *inputs: attention.variable_length(*inputs, starts, max(lengths), None),
        "by sequence": lambda *inputs: attention.each_sequence(*inputs, lengths, None),
    }
    if device.type == "cpu":
        ways = {"by sequence": ways["by sequence"]}
    elif attention.kernel_for(device, torch.bfloat16, 128) != "flash_attention_4":
        del ways["by flash-attn-4"]

    def compare(name, found, exact):
        errors = [((one.float() - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]
        part.fact(f"attention {name}: relative errors of output and gradients", [f"{each:.1e}" for each in errors])

    for name, way in ways.items():
        with part.attempt(f"attention {name}"):
            compare(name, results(way, torch.bfloat16), exact)
    packing, sinks = attention.Packing(lengths, starts), torch.randn(16, device=device)
    for name, learnt, options in (
        ("with a window", (), {"sliding_window": 20}),
        ("with sinks", (sinks,), {"sliding_window": 200}),
        ("with a soft cap", (), {"softcap": 2.0}),
        ("with a soft cap, a window and sinks", (sinks,), {"softcap": 2.0, "sliding_window": 200}),
    ):
        with part.attempt(f"attention {name}"):
            way = partial(packed_variant, packing, options)
            compare(name, results(way, torch.bfloat16, *learnt), results(way, torch.float32, *learnt))


def packed_variant(packing: attention.Packing, options: dict, query, key, value, sinks=None) -> torch.Tensor:
    """Packed attention as a layer calls it: in fp32 a sequence at a time, in 16 bits by the card's kernels."""
    return attention.packed_attention(None, query, key, value, packing=packing, s_aux=sinks, **options)[0]


def time_attention(part: Part) -> None:
    """Forward and backward pass of one long causal sequence, in TFLOP/s, by each kernel that there is."""
    length, heads, size, device = 256 if part.tiny else 16_384, 16, 128, part.device
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(1, each, length, size, device=device, dtype=torch.bfloat16) for each in (heads, 8, 8))
    ways = {
        "flash_4": lambda *inputs: attention.flash_attention_4(*inputs, starts, length, None),
        "torch": lambda *inputs: attention.variable_length(*inputs, starts, length, None),
        "cudnn": by_cudnn,
    }
    for name, way in ways.items():
        if device.type == "cpu" or (
            name == "flash_4" and attention.kernel_for(device, q.dtype, size) != "flash_attention_4"
        ):
            continue
        with part.attempt(f"speed of attention by {name}"):
            inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            output = way(*inputs)
            gradient = torch.randn_like(output)
            flops = 2.0 * length**2 * heads * size  # causal: half of the square, two products
            forward_s = seconds_of(lambda way=way, inputs=inputs: way(*inputs))
            backward_s = seconds_of(
                lambda output=output, gradient=gradient: output.backward(gradient, retain_graph=True)
            )
            part.row(f"gpu_attention_forward_tflops_{name}", flops / forward_s / 1e12, "TFLOP/s")
            part.row(f"gpu_attention_backward_tflops_{name}", 2.5 * flops / backward_s / 1e12, "TFLOP/s")


def by_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def time_row_products(part: Part) -> None:
    """Inner products of rows of logits, as the head computes entropies."""
    rows, vocabulary = (8, 512) if part.tiny else (768, 151_936)
    left, right = torch.randn(2, rows, vocabulary, device=part.device)
    for name, way in {
        "as the head does": lambda: row_products(left, right),
        "vecdot": lambda: torch.linalg.vecdot(left, right),
        "product, then sum": lambda: (left * right).sum(-1),
    }.items():
        part.fact(f"products of rows, {name}: ms", round(1e3 * seconds_of(way), 3))


def seconds_of(work: Callable[[], object], times: int = 5) -> float:
    """Mean seconds of `work` on the device, after two runs that are not counted."""
    for _ in range(2):
        work()
    synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - began) / times


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
