"""The same random tensors through TRL's GRPO loss and through recorded vectors of verl.

Where the two mean the same formula, losses and gradients are equal; what differs by intent:

- verl adds 1e-6 to the standard deviation of `grpo`, TRL 1e-4, this page's functions nothing;
- verl's `geometric` bounds mu / pi, so its band is the inverse, and it also leaves masked tokens out of the
  denominator, so only the mask is compared;
- the mean entropy of TRL's bonus is over tokens whatever the loss is normalised by, so only `token_mean` is compared.
"""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from learner_setup import BY_GROUPS, make_config
from trl.trainer.grpo_trainer import GRPOTrainer

from april.learner.diagnostics import StepTotals
from april.learner.losses import ADVANTAGES, corrections
from april.learner.losses.advantages import token_weights
from april.learner.losses.columns import Spans, log_ratio
from april.learner.objective import KL_ESTIMATORS, Objective, ResponseTokens

VECTORS = orjson.loads(Path(__file__).with_name("verl_vectors.json").read_bytes())
LENGTHS = torch.tensor(VECTORS["lengths"])
MASK = (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).float()
CLIPS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.03},
    "cispo": {"clip_low": 0.2, "clip_high": 0.28},
}


def column(name):
    return torch.tensor(VECTORS["columns"][name])


def padded(values):
    return torch.zeros_like(MASK).masked_scatter(MASK.bool(), values)


def spans():
    return Spans(torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS), LENGTHS.float())


def our_loss(algorithm, entropies=None):
    """(loss, its gradient with respect to each log-probability) of the recorded columns."""
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
    )
    leaf = column("logprobs").requires_grad_()
    entropies = torch.zeros(tokens) if entropies is None else entropies
    totals = StepTotals(torch.device("cpu"))
    objective = Objective(config)
    of_batch = (
        objective.batch_contexts([(known, leaf.detach())], leaf.device)[0] if objective.needs_batch_pass else None
    )
    loss = objective.loss(leaf, entropies, known, totals, column("reference"), of_batch)
    loss.backward()
    return loss.item(), leaf.grad


# --- verl ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VECTORS["losses"])
def test_policy_losses_and_gradients_of_verl(case):
    name, normalisation = case.split()
    horizon = {"constant_tokens": int(LENGTHS.max())} if normalisation == "constant" else {}
    loss, gradient = our_loss({"loss": name, "normalisation": normalisation, **CLIPS[name], **horizon})
    theirs = VECTORS["losses"][case]
    assert loss == pytest.approx(theirs["loss"], rel=1e-5)
    assert gradient.tolist() == pytest.approx(theirs["gradient"], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", BY_GROUPS)
def test_advantages_of_verl(name):
    rewards, lengths = defaultdict(list), defaultdict(list)
    for group, reward, length in zip(VECTORS["groups"], VECTORS["rewards"], VECTORS["lengths"], strict=True):
        rewards[group].append(reward)
        lengths[group].append(length)
    as_tensors = [[torch.tensor(g, dtype=torch.float64) for g in of.values()] for of in (rewards, lengths)]
    found = torch.cat(ADVANTAGES.find(name)(*as_tensors)).tolist()
    tolerance = 1e-5 if name == "grpo" else 1e-6
    assert found == pytest.approx(VECTORS["advantages"][name], rel=tolerance, abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_divergences_of_verl(name):
    found = KL_ESTIMATORS[name](column("logprobs"), column("reference"))
    assert found.tolist() == pytest.approx(VECTORS["divergences"][name], rel=1e-5, abs=5e-7)


def test_corrections_of_verl():
    ratios = log_ratio(column("logprobs"), column("behaviour"))
    ours = {
        "truncated": corrections.truncated(ratios, 1.2)[0],
        "truncated_sequence": corrections.truncated_sequence(ratios, spans(), 1.2)[0],
        "icepop": corrections.icepop(ratios, 0.8, 1.2),
        "geometric": corrections.geometric(ratios, spans(), 1 / 1.1, 1 / 0.9),
    }
    for name, weights in ours.items():
        assert weights.tolist() == pytest.approx(VECTORS["corrections"][name], rel=1e-5), name


# --- TRL ----------------------------------------------------------------------------------------------------


def trl_loss(loss_type, importance_sampling_level="token", entropies=None, **settings):
    """TRL's `_compute_loss` on the recorded columns, its model replaced by a table of log-probabilities."""
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


CASES = {
    "grpo": ({"normalisation": "sequence_mean"}, {"loss_type": "grpo"}),
    "dapo": ({"normalisation": "token_mean"}, {"loss_type": "dapo"}),
    "dr_grpo": ({"normalisation": "constant", "constant_tokens": 100}, {"loss_type": "dr_grpo"}),
    "dual clip": ({"normalisation": "token_mean", "dual_clip": 1.5}, {"loss_type": "bnpo", "delta": 1.5}),
    "reference": ({"normalisation": "sequence_mean", "kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "gspo": (
        {"loss": "gspo", "normalisation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.03},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.03},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_of_trl(case):
    ours, theirs = CASES[case]
    loss, gradient = our_loss(ours)
    expected_loss, expected_gradient = trl_loss(**theirs)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient.tolist() == pytest.approx(expected_gradient.tolist(), rel=1e-5, abs=1e-8)


def test_truncated_weights_of_trl():
    """TRL's loss around the current policy, weighted by min(pi / sampler, 1.2)."""
    weights = (padded(column("logprobs")) - padded(column("behaviour"))).exp().clamp(max=1.2)
    loss, gradient = our_loss({"proximal": "recomputed", "corrections": ["truncated"], "truncation": 1.2})
    expected_loss, expected_gradient = trl_loss("dapo", weights=weights)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient.tolist() == pytest.approx(expected_gradient.tolist(), rel=1e-5, abs=1e-8)


def test_the_entropy_bonus_of_trl():
    torch.manual_seed(5)
    ours, theirs = (torch.rand(int(LENGTHS.sum())).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    loss, _ = our_loss({"entropy_coef": 0.01}, entropies=ours)
    expected, _ = trl_loss("dapo", entropies=theirs, entropy_coef=0.01)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(ours.grad, theirs.grad)
