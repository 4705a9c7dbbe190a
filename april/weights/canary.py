"""The canary, by which a worker checks that its engine holds the weights it was sent.

It is a short token sequence, the same in every run of a model. The learner publishes its log-probabilities with every
version; an engine with the same weights computes nearly the same ones, and an engine with wrong weights is detected
before it samples (`april/workers/engines/weight_intake.py`). Imports no torch, since every process checks the
configuration, which imports the transports.
"""

import msgspec
import numpy as np

CANARY_TOKENS = 48
"""Length of the canary in tokens, unless the run's prompts and responses are shorter."""
SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
WORD_MASK = (1 << 64) - 1


class Canary(msgspec.Struct, array_like=True, frozen=True):
    """The canary: a fixed token sequence with the learner's log-probabilities under one version of the weights."""

    tokens: list[int]
    """T token ids of the canary."""
    logprobs: list[float]
    """T - 1 log-probabilities, of each canary token but the first, at temperature 1."""
    dtype: str
    """The less precise of the dtypes that the learner computes in and publishes: float32 or bfloat16."""

    @property
    def text(self) -> np.ndarray:
        """The canary's token ids as an array, int32 [T]."""
        return np.array(self.tokens, np.int32)


def canary_tokens(vocabulary: int, at_most: int = CANARY_TOKENS) -> np.ndarray:
    """The canary's token ids, int32 [T] with T = min(CANARY_TOKENS, `at_most`), from 0 to `vocabulary` - 1.

    Small ids are more likely, as in text: tokenisers give them to frequent tokens, whose embeddings training changes
    most. So the logarithm of the id is uniform, not the id.
    """
    shares = [splitmix(position * SPLITMIX_INCREMENT) / 2**64 for position in range(1, min(CANARY_TOKENS, at_most) + 1)]
    return np.array([int((vocabulary + 1) ** share) - 1 for share in shares], np.int32).clip(0, vocabulary - 1)


def splitmix(x: int) -> int:
    """Finaliser of the SplitMix64 generator: maps a 64-bit integer to a pseudo-random one."""
    x &= WORD_MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return x ^ (x >> 31)
