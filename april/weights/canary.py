"""The canary: a short text that is the same in every run of a model, and what the learner says of it.

The learner publishes its log-probabilities of the text with every version. An engine that holds the same weights says
nearly the same; one that does not is found before it has sampled anything (`april/workers/engines/proof.py`).
"""

import msgspec
import numpy as np

TOKENS = 48
"""of the text, where a run's prompts and responses may be so long"""
STREAM = 0x9E3779B97F4A7C15
"""by which SplitMix64 steps from each number to the next (Steele, Lea, Flood 2014)"""
WORD = (1 << 64) - 1


class Canary(msgspec.Struct, array_like=True, frozen=True):
    tokens: list[int]
    """T ids"""
    logprobs: list[float]
    """T - 1: of each token but the first, at temperature 1"""
    dtype: str
    """of the learner's computation or of what it publishes, the coarser one: float32, bfloat16"""

    @property
    def text(self) -> np.ndarray:
        """int32 [T]."""
        return np.array(self.tokens, np.int32)


def canary_tokens(vocabulary: int, at_most: int = TOKENS) -> np.ndarray:
    """int32 [T], T = TOKENS or `at_most`: ids of 0 to `vocabulary` - 1, small ones more often, as in a text.

    Tokenisers give small ids to what is frequent, and frequent tokens have embeddings that training moves. So the
    logarithm of an id is spread evenly, not the id.
    """
    shares = [mix(position * STREAM) / 2**64 for position in range(1, min(TOKENS, at_most) + 1)]
    return np.array([int((vocabulary + 1) ** share) - 1 for share in shares], np.int32).clip(0, vocabulary - 1)


def mix(x: int) -> int:
    """The finaliser of SplitMix64, of 64 bits."""
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)
