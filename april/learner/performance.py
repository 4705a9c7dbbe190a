"""Performance of a training step: floating-point operations by sequence length, peak rates for MFU, and phase times.

Operations are counted as in PaLM, arXiv 2204.02311, appendix B: per parameter and token 2 forward, 4 backward, 2 for a
reference policy; attention separately, and nothing for recomputed activations. Attention is causal: half of the full
square. With an adapter the backward pass has 2 operations, since frozen weights need no gradient; a head trained with
the adapter is not counted.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

PASSES, ADAPTER_PASSES = 3, 2
"""Cost of forward plus backward pass in units of a forward pass: all weights trained, or an adapter."""

PEAK_TFLOPS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "MI355X": 2517,
    "MI325X": 1307,
    "MI300X": 1307,
}
"""Dense 16-bit peak, TFLOP/s, from data sheets, by a substring of the accelerator's name; the first match counts."""


@dataclass(frozen=True)
class Cost:
    """Coefficients of the floating-point operations of one forward pass."""

    per_token: float
    """Floating-point operations of the model's body per input token."""
    per_square: float
    """Floating-point operations of attention per square of a sequence's length in input tokens."""
    per_target: float
    """Floating-point operations of the head per scored token."""

    def of(self, length: int, targets: int) -> float:
        """Forward operations of a sequence of `length` input tokens, `targets` of which are scored."""
        return self.per_token * length + self.per_square * length**2 + self.per_target * targets


def forward_cost(lm: nn.Module) -> Cost:
    """Cost of an unsharded Hugging Face causal LM; only the experts that a token is routed to count."""
    config = lm.config
    layers = lm.base_model.layers
    weights = sum(active_weights(layer, config) for layer in layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * len(layers) * config.num_attention_heads * head_dim
    return Cost(2.0 * weights, float(attention), 2.0 * lm.get_output_embeddings().weight.numel())


def active_weights(layer: nn.Module, config) -> float:
    """Number of a layer's weights that take part in the forward pass of one token."""
    total = 0.0
    for name, parameter in layer.named_parameters():
        share = 1.0
        if ".experts." in name:
            experts = getattr(config, "num_experts", None) or config.n_routed_experts
            share = config.num_experts_per_tok / experts
        total += share * parameter.numel()
    return total


def peak_tflops(device: torch.device) -> float | None:
    """Dense 16-bit peak of an accelerator, TFLOP/s; None if unknown."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


# --- phases of a step -------------------------------------------------------------------------------------------------

Seconds = Callable[[str], AbstractContextManager[None]]
"""Function from the name of a phase to a context manager that times the phase."""


class PhaseSeconds:
    """Wall-clock seconds by phase; synchronises with the accelerator at the end of each phase."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - start


def untimed(phase: str) -> AbstractContextManager[None]:
    return nullcontext()
