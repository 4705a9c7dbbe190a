"""A teacher that is a model folder, computed by transformers as it is."""

from typing import TYPE_CHECKING

import numpy as np

from april.workers.teachers.messages import TeacherError, TeacherRules

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 1024
"""Positions whose log-softmax is computed together, in float32: it takes ROWS * vocabulary * 4 bytes."""


class FolderTeacher:
    """Log-probabilities by a causal language model of transformers, in the folder's dtype, at temperature 1."""

    def __init__(self, rules: TeacherRules):
        import torch
        from transformers import AutoModelForCausalLM

        self.device, self.rules = torch.device(rules.device), rules
        model = AutoModelForCausalLM.from_pretrained(rules.path, dtype="auto", local_files_only=True)
        self.model = model.to(self.device).eval()

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities of the token ids 1 to T - 1 of a text, each given the ids before it: int32 [T] -> float32
        [T - 1]. With `top_k` = k > 0: float32 [T - 1, 1 + 2k], each followed by k pairs (id, log-probability) of the
        likeliest ids. Raises TeacherError."""
        import torch

        text = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        with torch.inference_mode():
            logits = self.model(text[None], use_cache=False).logits[0, :-1]
            if len(text) and int(text.max()) >= logits.shape[1]:
                raise TeacherError(f"has {logits.shape[1]} ids, and the text has id {int(text.max())}")
            found = [
                self.told(rows.float().log_softmax(-1), targets[:, None])
                for rows, targets in zip(logits.split(ROWS), text[1:].split(ROWS), strict=True)
            ]
        return torch.cat(found).cpu().numpy()

    def told(self, logprobs: "Tensor", targets: "Tensor") -> "Tensor":
        """The teacher's answer for n tokens, from the model's log-probabilities [n, V]: those of the token ids
        `targets`, int64 [n, 1], as float32 [n]. With `top_k` = k > 0, float32 [n, 1 + 2k]: each followed by the k
        likeliest pairs (id, log-probability) among the ids that the policy has too."""
        import torch

        own = logprobs.gather(1, targets)
        if not self.rules.top_k:
            return own[:, 0]
        top, ids = logprobs[:, : self.rules.vocabulary or None].topk(self.rules.top_k)
        return torch.cat([own, torch.stack([ids.to(own.dtype), top], -1).flatten(1)], 1)
