"""The canary: a short token sequence, the same in every run of a model, with the learner's log-probabilities.

The learner publishes the log-probabilities with every version. An engine with the same weights computes nearly the same
ones; an engine with wrong weights is detected before it samples (`april/workers/engines/proof.py`).
"""

import msgspec
import numpy as np

TOKENS = 48
"""Length of the canary in tokens, unless the run's prompts and responses are shorter."""
STREAM = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
WORD = (1 << 64) - 1


class Canary(msgspec.Struct, array_like=True, frozen=True):
    """The canary's tokens and the learner's log-probabilities under one version."""

    tokens: list[int]
    """T token ids."""
    logprobs: list[float]
    """T - 1 log-probabilities, of each token but the first, at temperature 1."""
    dtype: str
    """The coarser of the dtypes that the learner computes in and publishes: float32 or bfloat16."""

    @property
    def text(self) -> np.ndarray:
        """The tokens, int32 [T]."""
        return np.array(self.tokens, np.int32)


def canary_tokens(vocabulary: int, at_most: int = TOKENS) -> np.ndarray:
    """int32 [T], T = min(TOKENS, `at_most`): ids from 0 to `vocabulary` - 1, with small ids more likely, as in text.

    Tokenisers give small ids to frequent tokens, whose embeddings training changes most. So the logarithm of the id
    is uniform, not the id.
    """
    shares = [mix(position * STREAM) / 2**64 for position in range(1, min(TOKENS, at_most) + 1)]
    return np.array([int((vocabulary + 1) ** share) - 1 for share in shares], np.int32).clip(0, vocabulary - 1)


def mix(x: int) -> int:
    """The 64-bit finaliser of SplitMix64."""
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)
