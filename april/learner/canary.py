"""Scores the canary in the learner under each version, and measures the effect of rounding on the scores.

The canary is a short text. Learner and inference engine each score it; equal scores show that the engine has the
version's weights.
"""

import numpy as np
import torch
from torch import Tensor

from april.config import Config
from april.learner.backends.backend import Backend
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.packing import pack
from april.weights.canary import CANARY_TOKENS, Canary, canary_tokens, longest_canary, rounded_otherwise
from april.wire.message import Version

ROUNDING_EVERY = 8
"""Number of versions between two measurements of the effect of rounding on the canary."""


class CanaryScorer:
    """Scores a short text under the weights of a back end, as in a training step.

    scorer.see(batch)               # half of the text is of the first batch that the process has trained
    canary = scorer.scored()
    """

    def __init__(self, config: Config, backend: Backend, device: torch.device):
        self.config, self.backend, self.device = config, backend, device
        self.trained_text: np.ndarray | None = None
        """First token ids of the first batch that `see` was given, int32, of which a part of the text is made; None
        before it."""
        self._rounding: tuple[bytes, int, float] = b"", 0, 0.0
        """(bytes of the token ids on which the effect of rounding was measured, number of versions scored with these
        ids, mean difference of the log-probabilities that rounding makes, nats)."""

    def see(self, batch: TrainingBatch) -> None:
        if self.trained_text is None and batch.samples:
            self.trained_text = np.concatenate([sample.tokens for sample in batch.samples])[:CANARY_TOKENS]

    def scored(self) -> Canary:
        """The canary with its log-probabilities under the current weights, and the effect of rounding on them, which is
        measured for the first of every `ROUNDING_EVERY` versions. Collective."""
        config, embedding = self.config, self.backend.lm.get_input_embeddings()
        tokens = canary_tokens(embedding.num_embeddings, longest_canary(config), self.trained_text)
        logprobs = self._score(tokens)
        text, used, rounding = self._rounding
        if text != tokens.tobytes() or used % ROUNDING_EVERY == 0:
            with rounded_otherwise(self.backend.policy):
                rounding = (self._score(tokens, torch.bfloat16) - logprobs).abs().mean().item()
        self._rounding = tokens.tobytes(), used + 1, rounding
        dtype = self.backend.compute_dtype if self.device.type == "cpu" else "bfloat16"
        return Canary(tokens.tolist(), logprobs.tolist(), dtype, rounding)

    def _score(self, tokens: np.ndarray, logit_dtype: torch.dtype = torch.float32) -> Tensor:
        """Log-probabilities, float32 [T - 1], of `tokens` int32 [T] but the first, at temperature 1. Collective."""
        scored = len(tokens) - 1
        text = TrainSample(tokens, 1, np.zeros(scored, np.float32), 0.0, ((0, scored, Version(0, 0)),))
        policy = self.backend.policy.eval()
        policy.logit_dtype = logit_dtype
        ((logprobs, _),) = self.backend.scores(policy, [pack([text], self.device)], temperature=1.0)
        policy.logit_dtype = torch.float32
        policy.train()
        self.backend.free_gathered()
        return logprobs
