"""What a token weighs in the loss of the global batch, or of its minibatch where several optimizer steps share a batch.

The weights are known before any forward pass and refer to the whole minibatch over all ranks. So the shares of
micro-batches, and their gradients, are added up and never averaged, however the batch was split.
"""

import numpy as np


def token_weights(
    kind: str, lengths: np.ndarray, tokens: np.ndarray, sequences: np.ndarray, constant_tokens: int
) -> np.ndarray:
    """One weight for each of S sequences of `lengths` response tokens, which all its tokens have; float64 [S].

    `tokens` and `sequences`, [S]: T and N of the minibatch that a sequence is in, those counted that have no gradient:

    - `token_mean`: 1 / T, DAPO, arXiv 2503.14476, equation 12;
    - `sequence_mean`: 1 / (N length), GRPO, arXiv 2402.03300, equation 3;
    - `constant`: 1 / (N constant_tokens), Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    if kind == "token_mean":
        return 1 / tokens
    if kind == "sequence_mean":
        return 1 / (sequences * lengths.astype(np.float64))
    return 1 / (sequences * constant_tokens)
