"""The same random tensors through TRL's GRPO loss and through recorded vectors of verl.

Where the two mean the same formula, losses and gradients are equal; what differs by intent:

- verl adds 1e-6 to the standard deviation of `grpo`, TRL 1e-4, this page's functions nothing;
- verl's `geometric` bounds mu / pi, so its band is the inverse, and it also leaves masked tokens out of the
  denominator, so only the mask is compared;
- the mean entropy of TRL's bonus is over tokens whatever the loss is normalised by, so only `token_mean` is compared.
"""

from collections import defaultdict

import pytest
import torch

from april.config.training import AlgorithmSection
from april.learner.losses import ADVANTAGES, CORRECTIONS
from april.learner.losses.kl import KL_ESTIMATORS
from tests.support.learner.loss_inputs import stale
from tests.support.learner.recorded_losses import LENGTHS, VECTORS, column, our_loss, padded, trl_loss
from tests.support.learner.small_learner import BY_GROUPS

CLIPS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.03},
    "cispo": {"clip_low": 0.2, "clip_high": 0.28},
}


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
    seen = stale(column("logprobs"), column("behaviour"), column("advantages"), LENGTHS.tolist())
    section = AlgorithmSection(
        truncation=1.2, sequence_truncation=1.2, icepop_low=0.8, icepop_high=1.2, geometric_low=1 / 1.1,
        geometric_high=1 / 0.9,
    )  # fmt: skip
    for name, theirs in VECTORS["corrections"].items():
        found = CORRECTIONS.find(name)(seen, section)
        weights = found[0] if isinstance(found, tuple) else found
        assert weights.tolist() == pytest.approx(theirs, rel=1e-5), name


# --- TRL ----------------------------------------------------------------------------------------------------


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


@pytest.mark.xdist_group("trl")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_of_trl(case):
    ours, theirs = CASES[case]
    loss, gradient = our_loss(ours)
    expected_loss, expected_gradient = trl_loss(**theirs)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient.tolist() == pytest.approx(expected_gradient.tolist(), rel=1e-5, abs=1e-8)


@pytest.mark.xdist_group("trl")
def test_truncated_weights_of_trl():
    """TRL's loss around the current policy, weighted by min(pi / sampler, 1.2)."""
    weights = (padded(column("logprobs")) - padded(column("behaviour"))).exp().clamp(max=1.2)
    loss, gradient = our_loss({"proximal": "recomputed", "corrections": ["truncated"], "truncation": 1.2})
    expected_loss, expected_gradient = trl_loss("dapo", weights=weights)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient.tolist() == pytest.approx(expected_gradient.tolist(), rel=1e-5, abs=1e-8)


@pytest.mark.xdist_group("trl")
def test_the_entropy_bonus_of_trl():
    torch.manual_seed(5)
    ours, theirs = (torch.rand(int(LENGTHS.sum())).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    loss, _ = our_loss({"entropy_coef": 0.01}, entropies=ours)
    expected, _ = trl_loss("dapo", entropies=theirs, entropy_coef=0.01)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(ours.grad, theirs.grad)
