"""What the learner's step is measured beside: the plainest loop of transformers over packed and over padded rows."""

import time

import numpy as np
import torch
import torch.nn.functional as F
from part import QWEN3_SHAPES
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config

from april.learner import attention
from april.learner.batch import TrainSample
from april.learner.packing import MicroBatch, input_tokens

LR = 1e-6
HEAD_ROWS = 2048
"""Tokens that are scored at once."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bare:
    """The plainest loop over packed micro-batches: a model of transformers and AdamW, both in bf16."""

    def __init__(self, shape: str, longest: int, recompute: bool, device: torch.device):
        config = Qwen3Config(
            **QWEN3_SHAPES[shape], max_position_embeddings=longest, bos_token_id=None, eos_token_id=None
        )
        with torch.device(device):
            self.lm = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention.register()
            )
        self.lm.train()
        if recompute:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=LR, fused=True)
        self.device = device

    def step(self, micros: list[MicroBatch]) -> None:
        for micro in micros:
            longest = max(micro.seq_lens)
            hidden = self.lm.base_model(
                input_ids=micro.ids, position_ids=micro.positions, use_cache=False, seq_lens=micro.seq_lens,
                cu_seq_lens_q=micro.cu_seq_lens, cu_seq_lens_k=micro.cu_seq_lens, max_length_q=longest,
                max_length_k=longest,
            ).last_hidden_state  # fmt: skip
            self.loss(hidden[0, micro.target_rows], micro.targets).backward()
        self.update()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the targets' negative log-probabilities, by chunks whose logits the backward pass recomputes."""
        total = torch.zeros((), device=hidden.device)
        for rows, chunk in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            total = total + checkpoint(self.chunk_loss, rows, chunk, use_reentrant=False)
        return total / len(targets)

    def chunk_loss(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm.lm_head(rows).float(), targets, reduction="sum")

    def step_padded(self, samples: list[TrainSample], budget_tokens: int, limit_s: float) -> float:
        """Tokens/s over padded rows in the order of arrival, as many passes as `limit_s` has room for."""
        self.lm.set_attn_implementation("sdpa")
        done, began = 0, time.perf_counter()
        for rows in padded_passes(samples, budget_tokens):
            width = max(map(input_tokens, rows))
            ids, mask, targets = torch.zeros(3, len(rows), width, dtype=torch.int64)
            behind_prompt = torch.zeros(len(rows), width, dtype=torch.bool)
            for row, sample in enumerate(rows):
                length, tokens = input_tokens(sample), torch.from_numpy(sample.tokens.astype(np.int64))
                ids[row, :length], targets[row, :length], mask[row, :length] = tokens[:-1], tokens[1:], 1
                behind_prompt[row, sample.prompt_tokens - 1 : length] = True
            ids, mask, targets, behind_prompt = (
                tensor.to(self.device) for tensor in (ids, mask, targets, behind_prompt)
            )
            hidden = self.lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            self.loss(hidden[behind_prompt], targets[behind_prompt]).backward()
            synchronize(self.device)
            done += sum(map(input_tokens, rows))
            if time.perf_counter() - began > limit_s:
                break
        self.update()
        return done / (time.perf_counter() - began)


def padded_passes(samples: list[TrainSample], budget_tokens: int) -> list[list[TrainSample]]:
    """Consecutive samples whose rows, padded to the longest, hold at most the budget."""
    passes: list[list[TrainSample]] = [[]]
    for sample in samples:
        longest = max(map(input_tokens, [*passes[-1], sample]))
        if passes[-1] and longest * (len(passes[-1]) + 1) > budget_tokens:
            passes.append([])
        passes[-1].append(sample)
    return passes
