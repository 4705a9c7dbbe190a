"""Weight of each token in the loss of the global batch, or of its minibatch if a batch has several optimizer steps.

The weights are known before any forward pass and refer to the whole minibatch over all ranks. So the losses of
micro-batches, and their gradients, are summed and never averaged, however the batch was split.
"""

import numpy as np


def token_weights(
    kind: str, lengths: np.ndarray, tokens: np.ndarray, sequences: np.ndarray, constant_tokens: int
) -> np.ndarray:
    """Weight of each token of S sequences, the same for all tokens of a sequence; float64 [S].

    `lengths` [S] are response tokens. `tokens` and `sequences` [S] are T, the tokens, and N, the sequences, of the
    minibatch that a sequence is in; samples without a gradient count too.

    - `token_mean`: 1 / T, DAPO, arXiv 2503.14476, equation 12;
    - `sequence_mean`: 1 / (N length), GRPO, arXiv 2402.03300, equation 3;
    - `constant`: 1 / (N constant_tokens), Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    if kind == "token_mean":
        return 1 / tokens
    if kind == "sequence_mean":
        return 1 / (sequences * lengths.astype(np.float64))
    return 1 / (sequences * constant_tokens)
