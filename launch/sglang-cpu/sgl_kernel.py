"""Stands in for SGLang's compiled kernels on a CPU: SGLang imports names from here but runs its plain torch forms."""

import torch

OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
"""Operators that the modules of vision-language models look up when they are imported, and call only for Qwen3.5."""
for operator in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    OPERATORS.define(operator + "(Tensor input) -> Tensor")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel, which a CPU installation does not have")

    return missing
