"""Floating-point operations of a model's training step: what a forward pass costs by sequence length, and MFU.

Counted as in PaLM, arXiv 2204.02311, appendix B: two operations a parameter and token forward, four backward, two of
a reference policy, attention apart, nothing for activations that are computed again. Attention is causal, half of the
full square. Where an adapter is trained, the backward pass has two: weights that stand still have no gradient. That
of a head that is trained beside it is left out.
"""

from dataclasses import dataclass

import torch
from torch import nn

PASSES, ADAPTER_PASSES = 3, 2
"""a training step over a forward pass: backward costs twice as much as forward, or once, a reference policy once"""

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
"""dense 16-bit peak by a part of the accelerator's name, the first that fits, from the makers' data sheets"""


@dataclass(frozen=True)
class Cost:
    """Operations of one forward pass of the model."""

    per_token: float
    """body of the model, for each input token"""
    per_square: float
    """attention, for each squared input token of a sequence"""
    per_target: float
    """head, for each token that is scored"""

    def of(self, length: int, targets: int) -> float:
        """Of a sequence of `length` input tokens, `targets` of which are scored."""
        return self.per_token * length + self.per_square * length**2 + self.per_target * targets


def cost(lm: nn.Module) -> Cost:
    """Of an unsharded Hugging Face causal LM; of its experts, those that a token visits are counted."""
    config = lm.config
    layers = lm.base_model.layers
    weights = sum(active_weights(layer, config) for layer in layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * len(layers) * config.num_attention_heads * head_dim
    return Cost(2.0 * weights, float(attention), 2.0 * lm.get_output_embeddings().weight.numel())


def active_weights(layer: nn.Module, config) -> float:
    """Weights of a layer that take part in a token's products."""
    total = 0.0
    for name, parameter in layer.named_parameters():
        share = 1.0
        if ".experts." in name:
            experts = getattr(config, "num_experts", None) or config.n_routed_experts
            share = config.num_experts_per_tok / experts
        total += share * parameter.numel()
    return total


def peak_tflops(device: torch.device) -> float | None:
    """Dense 16-bit peak of an accelerator that is known, None of others."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
