"""Performance of a training step: floating-point operations by sequence length, peak rates for MFU, and phase times.

Operations are counted as in PaLM, arXiv 2204.02311, appendix B: per parameter and token 2 forward, 4 backward, 2 for a
reference policy; attention separately, and nothing for recomputed activations. Attention is causal: half of the full
square, of which windows and chunks leave out a part. With an adapter the backward pass has 2 operations, since frozen
weights need no gradient; a head trained with the adapter is not counted. Of a vision tower its weights count, for each
patch of an image, and not its attention.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from april.learner.attention import Reach
from april.learner.mixers import uses_attention
from april.learner.vision import text_model, tower

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys by which models' configurations name the number of a layer's experts."""
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
    per_square: dict[Reach, float]
    """Floating-point operations of attention, by how far its layers see, per square of a sequence's length in input
    tokens, as `Reach.squares` counts it."""
    per_target: float
    """Floating-point operations of the head per scored token."""
    per_image_token: float = 0.0
    """Floating-point operations of the vision tower per token that stands for a part of an image."""

    def of(self, length: int, targets: int) -> float:
        """Forward operations of a sequence of `length` input tokens, `targets` of which are scored."""
        attention = sum(each * reach.squares(length) for reach, each in self.per_square.items())
        return self.per_token * length + attention + self.per_target * targets


def forward_cost(lm: nn.Module) -> Cost:
    """Cost of an unsharded Hugging Face causal LM; only the experts that a token is routed to count."""
    config = lm.config.get_text_config()
    weights, per_square = 0.0, dict[Reach, float]()
    for index, layer in enumerate(text_model(lm).layers):
        own = config.per_layer_config[index] if config.is_heterogeneous else config
        weights += active_weights(layer, own)
        if any(map(uses_attention, layer.modules())):
            reach = reach_of(index, own)
            per_square[reach] = per_square.get(reach, 0.0) + operations_of_heads(own)
    head = 2.0 * lm.get_output_embeddings().weight.numel()
    return Cost(2.0 * weights, per_square, head, operations_of_tower(lm))


def operations_of_tower(lm: nn.Module) -> float:
    """Floating-point operations of a model's vision tower per token of an image, which stands for several patches; 0
    without a tower."""
    found = tower(lm)
    if found is None:
        return 0.0
    patches = lm.config.vision_config.spatial_merge_size**2
    mergers = sum(
        parameter.numel() for name, parameter in found.named_parameters() if "merger" in name and parameter.dim() > 1
    )
    others = sum(
        parameter.numel() for name, parameter in found.named_parameters()
        if "merger" not in name and "pos_embed" not in name and parameter.dim() > 1
    )  # fmt: skip
    return 2.0 * (patches * others + mergers)


def reach_of(index: int, config: PreTrainedConfig) -> Reach:
    """The `Reach` of the attention of layer number `index`, according to the model's `config`."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    by_kind = {"sliding_attention": Reach(window), "chunked_attention": Reach(chunk=chunk)}
    if kinds := getattr(config, "layer_types", None):
        return by_kind.get(kinds[index], Reach())
    return Reach(window) if window is not None else Reach(chunk=chunk)


def operations_of_heads(config: PreTrainedConfig) -> float:
    """Floating-point operations of one layer's attention in a forward pass, divided by `Reach.squares` of the
    sequence."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "qk_head_dim", None) or size
    return float(heads * (keys + (getattr(config, "v_head_dim", None) or keys)))


def active_weights(layer: nn.Module, config: PreTrainedConfig) -> float:
    """Number of a layer's weights that take part in the forward pass of one token."""
    total = 0.0
    for name, parameter in layer.named_parameters():
        share = 1.0
        if ".experts." in name:
            experts = next(filter(None, (getattr(config, key, None) for key in EXPERT_COUNTS)), 1)
            share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
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
