"""Losses of April and TRL on inputs that `make_verl_vectors.py` of commit 9189176b recorded from verl."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import torch

from april.learner.diagnostics import StepTotals
from april.learner.losses.advantages import token_weights
from april.learner.losses.columns import Spans
from april.learner.objective import Objective, ResponseTokens
from tests.support.learner.small_learner import make_config

VECTORS = orjson.loads(Path(__file__).with_name("verl_vectors.json").read_bytes())
LENGTHS = torch.tensor(VECTORS["lengths"])
MASK = (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).float()


def column(name):
    return torch.tensor(VECTORS["columns"][name])


def padded(values):
    return torch.zeros_like(MASK).masked_scatter(MASK.bool(), values)


def spans():
    return Spans(torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS), LENGTHS.float())


def our_loss(algorithm, entropies=None):
    """April's loss of the recorded inputs, and its gradient with respect to each log-probability."""
    config = make_config(Path("unused"), Path("unused"), algorithm=algorithm)
    tokens, constant = int(LENGTHS.sum()), algorithm.get("constant_tokens", 0)
    of_all = np.full((2, len(LENGTHS)), [[tokens], [len(LENGTHS)]])
    weights = token_weights(config.algorithm.normalisation, LENGTHS.numpy(), *of_all, constant)
    known = ResponseTokens(
        behaviour_logprobs=column("behaviour"),
        advantages=column("advantages"),
        weights=torch.repeat_interleave(torch.from_numpy(weights), LENGTHS).float(),
        ages=torch.zeros(tokens, dtype=torch.int64),
        spans=spans(),
        rewards=torch.zeros(len(LENGTHS)),
        scores={"reference_logprobs": column("reference")},
    )
    leaf = column("logprobs").requires_grad_()
    entropies = torch.zeros(tokens) if entropies is None else entropies
    totals = StepTotals(torch.device("cpu"))
    objective = Objective(config)
    (of_batch,) = objective.batch_contexts([(known, leaf.detach())], leaf.device)
    loss = objective.loss(leaf, entropies, known, totals, of_batch)
    loss.backward()
    return loss.item(), leaf.grad


def trl_loss(loss_type, importance_sampling_level="token", entropies=None, **settings):
    """TRL's `_compute_loss` on the recorded columns, its model replaced by a table of log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer  # takes seconds, which tests without it need not wait

    leaf = column("logprobs").requires_grad_()
    entropy_table = torch.zeros_like(MASK) if entropies is None else padded(entropies)
    weights = settings.pop("weights", None)
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(leaf), entropy_table, None),
        accelerator=same,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=False,
            steps_per_generation=1,
            **settings.pop("vespo", {}),
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=importance_sampling_level,
        loss_type=loss_type,
        beta=settings.pop("beta", 0.0),
        epsilon_low=settings.pop("epsilon_low", 0.2),
        epsilon_high=settings.pop("epsilon_high", 0.28),
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=100,
        entropy_coef=settings.pop("entropy_coef", 0.0),
        _entropy_bonus_enabled=entropies is not None,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )
    assert not settings
    ids = torch.zeros_like(MASK, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": MASK,
        "advantages": padded(column("advantages"))[:, 0], "num_items_in_batch": MASK.sum(),
        "ref_per_token_logps": padded(column("reference")), "importance_sampling_ratio": weights,
        "old_per_token_logps": padded(column("behaviour")) if weights is None else None,
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return loss.item(), leaf.grad
