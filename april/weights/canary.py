"""The canary, by which a worker checks that its engine holds the weights it was sent.

It is a token sequence: samples of the first batch that was trained, followed by tokens that are the same in every run
of a model. The learner publishes its log-probabilities with every version; an engine with the same weights computes
nearly the same ones, and an engine with wrong weights is detected before it samples
(`april/workers/engines/weight_loading.py`). Imports no torch at module level, since every process checks the
configuration, which imports the transports.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn

    from april.config import Config

CANARY_TOKENS = 512
"""Length of the canary in tokens, unless the run's prompts and responses are shorter."""
RESERVED_TOKENS = 8
"""Number of tokens that a canary leaves free in the model's context at least: SGLang accepts no text that comes within
6 tokens of the context length."""
SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
WORD_MASK = (1 << 64) - 1
AT_ONCE = 2.0
"""Ratio of the mean difference between learner and engine to `Canary.rounding` above which a single comparison shows
wrong weights."""
SUSPECT = 1.2
"""Ratio of the mean difference between learner and engine to `Canary.rounding` above which a comparison adds to the
evidence of wrong weights (`added_evidence`); a comparison with a lower ratio reduces the evidence."""
EVIDENCE_LIMIT = math.log(AT_ONCE / SUSPECT)
"""Result of `added_evidence` above which the engine's weights count as wrong."""


class Canary(msgspec.Struct, array_like=True, frozen=True):
    """A fixed token sequence with its log-probabilities under one version of the weights, as the learner computes them:
    proves that an engine holds that version."""

    tokens: list[int]
    """T token ids of the canary."""
    logprobs: list[float]
    """T - 1 log-probabilities, of each canary token but the first, at temperature 1."""
    dtype: str
    """The less precise of the dtypes that the learner computes in and publishes: float32 or bfloat16."""
    rounding: float = 0.0
    """Mean difference that rounding to bfloat16 makes in `logprobs`, as the learner has measured it on the weights of
    this version (nats); 0 if it has not been measured."""

    @property
    def text(self) -> np.ndarray:
        """The canary's token ids as an array, int32 [T]."""
        return np.array(self.tokens, np.int32)


def longest_canary(config: "Config") -> int:
    """Maximum number of tokens of a canary that every engine takes: less than the longest sequence of the run, and at
    most the model's context less `RESERVED_TOKENS`."""
    longest = config.longest_prompt_tokens + config.sampling.max_response_tokens - 1
    return min(longest, config.context_tokens - RESERVED_TOKENS) if config.context_tokens else longest


def canary_tokens(vocabulary: int, at_most: int = CANARY_TOKENS, text: "np.ndarray | None" = None) -> np.ndarray:
    """The canary's token ids, int32 [T] with T = min(CANARY_TOKENS, `at_most`), from 0 to `vocabulary` - 1.

    The first half is the beginning of `text`, token ids int32 [n], if there is one. Of the others small ids are more
    likely, as in text: tokenisers give them to frequent tokens, whose embeddings training changes most. So the
    logarithm of the id is uniform, not the id.
    """
    length = min(CANARY_TOKENS, at_most)
    real = np.zeros(0, np.int32) if text is None else np.asarray(text[: length // 2], np.int32)
    shares = [splitmix(position * SPLITMIX_INCREMENT) / 2**64 for position in range(1, length - len(real) + 1)]
    drawn = np.array([int((vocabulary + 1) ** share) - 1 for share in shares], np.int32).clip(0, vocabulary - 1)
    return np.concatenate([real, drawn])


def splitmix(x: int) -> int:
    """Finaliser of the SplitMix64 generator: maps a 64-bit integer to a pseudo-random one."""
    x &= WORD_MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return x ^ (x >> 31)


def added_evidence(evidence: float, excess: float) -> float:
    """The evidence of wrong weights, at least 0, after one more comparison of learner and engine. `evidence`: result of
    the call for the comparison before, at first 0. `excess`: mean difference of the log-probabilities, divided by the
    difference that rounding makes.

    It is Page's CUSUM (Biometrika 41, 1954) of ln(excess / SUSPECT): wrong weights are shown above `EVIDENCE_LIMIT`, at
    once by an excess of 2, by 1.28 with the eighth comparison. If ln(excess / SUSPECT) is distributed normally with
    mean -m and deviation s, independent between comparisons, right weights are suspected in N of them with a
    probability of at most N exp(-2 m EVIDENCE_LIMIT / s^2).
    """
    return max(0.0, evidence + math.log(max(excess, 1e-9) / SUSPECT))


# --- what rounding does -----------------------------------------------------------------------------------------------

CHANGED_SHARE = 1 / 12
"""Share of values that `rounded_otherwise` raises by a unit in the last place, and share that it lowers. The variance
of this change, 2/12 of a squared unit, is that of the difference of two roundings, each uniform within half a unit."""
BFLOAT16_MANTISSA_BITS = 8
"""Number of bits of a bfloat16's significand, including the leading one, which is not stored."""


@contextmanager
def rounded_otherwise(model: "nn.Module") -> Iterator[None]:
    """Context manager in which the results of `model`'s layers, and of its modules with parameters, are perturbed as if
    another bfloat16 computation had rounded them. The change of the model's output is the effect of rounding.

    Changes are drawn from a fixed seed, so ranks that compute the same values change them in the same way.
    """
    import torch
    from torch import nn

    generators: dict[torch.device, torch.Generator] = {}

    def change(module: nn.Module, arguments: object, result: Any) -> Any:
        if isinstance(result, tuple) and result:
            first = change(module, arguments, result[0])
            named: Any = result
            return named._replace(**{named._fields[0]: first}) if hasattr(named, "_fields") else (first, *result[1:])
        return with_rounding(result) if isinstance(result, torch.Tensor) and result.is_floating_point() else result

    def with_rounding(values: "Tensor") -> "Tensor":
        generator = generators.setdefault(values.device, torch.Generator(values.device).manual_seed(0))
        drawn = torch.rand(values.shape, generator=generator, device=values.device)
        units = (drawn > 1 - CHANGED_SHARE).float() - (drawn < CHANGED_SHARE).float()
        exponents = torch.frexp(values.float()).exponent - BFLOAT16_MANTISSA_BITS
        return (values.float() + torch.ldexp(units, exponents)).to(values.dtype)

    layers = {layer for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack}
    rounding = {module for module in model.modules() if next(module.parameters(recurse=False), None) is not None}
    handles = [module.register_forward_hook(change) for module in layers | rounding]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled layers do not see hooks of the modules within
            yield
    finally:
        for handle in handles:
            handle.remove()
