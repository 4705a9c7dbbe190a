"""Loss, gradients and metrics of every algorithm x correction x normalisation equal the one-page reference."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from april.config.checks import check_algorithm
from april.learner.algorithms import Algorithms
from april.learner.batch import TrainingBatch
from tests.support.learner.algorithm_cases import ADVANTAGES, CORRECTIONS, LOSSES, NORMALISATIONS
from tests.support.learner.frozen_weights import FrozenReference, FrozenTrainer, assert_equals, short
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.small_learner import batch_in_turns, cut_batch, far_batch, make_config, settings, stale_batch
from tests.support.marks import full

pytestmark = pytest.mark.xdist_group("objective_reference")
KINDS = list(product(ADVANTAGES, NORMALISATIONS))
BUDGETS = (16, 60, 100_000)
"""Token budgets of a micro-batch: below the longest sample, a few micro-batches, all in one."""


class Pair:
    """The pipeline on one rank and the reference, on the same frozen weights."""

    def __init__(self, policy, folder, batch):
        self.policy, self.folder, self.batch = policy, folder, short(batch)
        self.trainer, self.reference = FrozenTrainer(policy, folder), FrozenReference(policy, folder)

    def compare(self, budget: int, algorithm: dict) -> dict[str, float]:
        config = make_config(self.policy, self.folder, algorithm=algorithm, microbatch_tokens=budget, grad_clip=1e9)
        check_algorithm(config.algorithm)
        metrics, gradients = self.trainer.gradients(self.batch, config)
        assert_equals(metrics, gradients, self.reference.expected(self.batch, config))
        return metrics


@pytest.fixture(scope="module")
def lone_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def pair(lone_rank, policy_folder, tmp_path_factory):
    return Pair(policy_folder, tmp_path_factory.mktemp("pair"), stale_batch(policy_folder))


@pytest.fixture(scope="module")
def pair_in_turns(lone_rank, policy_folder, tmp_path_factory):
    return Pair(policy_folder, tmp_path_factory.mktemp("turns"), batch_in_turns(policy_folder))


@pytest.fixture(scope="module")
def pair_cut(lone_rank, policy_folder, tmp_path_factory):
    return Pair(policy_folder, tmp_path_factory.mktemp("cut"), cut_batch(policy_folder))


@pytest.fixture(scope="module")
def pair_far(lone_rank, policy_folder, tmp_path_factory):
    return Pair(policy_folder, tmp_path_factory.mktemp("far"), far_batch(policy_folder))


@pytest.mark.full
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "ppo dual"])
def test_every_algorithm_with_every_correction_and_normalisation(pair, loss, correction):
    """A third of the combinations, in which any two choices occur together."""
    seen = set()
    shift = list(LOSSES).index(loss)
    for i, advantage in enumerate(ADVANTAGES):
        normalisation = NORMALISATIONS[(i + shift + list(CORRECTIONS).index(correction)) % 3]
        keys = {"advantage": advantage, "normalisation": normalisation}
        metrics = pair.compare(BUDGETS[(i + shift) % 3], keys | LOSSES[loss] | CORRECTIONS[correction])
        seen |= {name for name in ("clip_fraction", "mask_fraction", "truncated_fraction") if 0 < metrics[name] < 1}
    caps = {"truncated", "truncated_sequence"} & set(CORRECTIONS[correction]["corrections"])
    assert ("truncated_fraction" in seen) == bool(caps)
    masks = {"icepop", "geometric", "on_policy_only", "m2po", "dppo_tv"} & set(CORRECTIONS[correction]["corrections"])
    assert ("mask_fraction" in seen) == bool(masks)
    if CORRECTIONS[correction]["proximal"] != "recomputed":
        assert "clip_fraction" in seen, "no token met the clip, so this case has not tried it"


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES)
def test_observations_count_in_nothing(pair_in_turns, loss):
    """All lengths, means and sums of an algorithm are over sampled tokens only."""
    regularised = {"kl_coef": 0.1, "entropy_coef": 0.05, "behaviour_coef": 0.3}
    for i, correction in enumerate(CORRECTIONS):
        advantage, normalisation = KINDS[i % len(KINDS)]
        keys = {"advantage": advantage, "normalisation": normalisation} | (regularised if i % 2 else {})
        metrics = pair_in_turns.compare(BUDGETS[i % len(BUDGETS)], keys | LOSSES[loss] | CORRECTIONS[correction])
    samples = pair_in_turns.batch.samples
    sampled = sum(end - start for sample in samples for start, end, _ in sample.segments)
    assert metrics["tokens"] == sampled < sum(sample.response_tokens for sample in samples)


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES)
def test_ratios_of_tokens_and_of_whole_responses_are_clamped(pair_far, loss):
    pulled = {"behaviour_coef": 0.3}
    for i, correction in enumerate(CORRECTIONS):
        advantage, normalisation = KINDS[i % len(KINDS)]
        keys = {"advantage": advantage, "normalisation": normalisation} | (pulled if i % 2 else {})
        metrics = pair_far.compare(BUDGETS[i % len(BUDGETS)], keys | LOSSES[loss] | CORRECTIONS[correction])
    assert metrics["ratio_max"] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_tokens_of_a_cut_distribution_are_scored_within_their_support(pair_cut, loss):
    """Log-probability, entropy and divergence are renormalised over each token's support; observations have none."""
    regularised = {"kl_coef": 0.1, "entropy_coef": 0.05, "behaviour_coef": 0.3}
    for budget, correction in zip(BUDGETS, ("clip", "truncated_sequence", "decoupled"), strict=True):
        pair_cut.compare(budget, (regularised if budget != 60 else {}) | LOSSES[loss] | CORRECTIONS[correction])


def test_no_gradient_comes_from_the_prediction_of_an_observation(pair_in_turns):
    """A hidden state has a gradient exactly where the next token was sampled."""
    sample = max(pair_in_turns.batch.samples, key=lambda sample: len(sample.segments))
    batch, seen = TrainingBatch(6, [[sample, replace(sample, reward=sample.reward + 1)]]), []
    config = make_config(pair_in_turns.policy, pair_in_turns.folder, algorithm={"entropy_coef": 0.1})
    trainer = pair_in_turns.trainer
    trainer.config, trainer.algorithms = config, Algorithms(config)
    hook = trainer.policy.lm.model.norm.register_full_backward_hook(
        lambda module, inputs, outputs: seen.append(outputs[0].detach().clone())
    )
    trainer.step(batch)
    hook.remove()
    rows = seen[0][0].abs().sum(-1).reshape(2, -1)
    predicted = [sample.prompt_tokens - 1 + place for start, end, _ in sample.segments for place in range(start, end)]
    others = sorted(set(range(rows.shape[1])) - set(predicted))
    assert (rows[:, predicted] > 0).all()
    assert len(others) > sample.prompt_tokens and (rows[:, others] == 0).all()


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_the_divergence_from_the_reference_policy(pair, estimator, normalisation):
    for budget in (8, *BUDGETS):
        metrics = pair.compare(budget, {"kl_coef": 0.1, "kl_estimator": estimator, "normalisation": normalisation})
    assert metrics["reference_kl"] != 0
    assert metrics["trained_tokens"] == metrics["tokens"], "samples without an advantage have a gradient, too"


@pytest.mark.parametrize("shift", [0, full(1), full(2)])
@pytest.mark.parametrize(("place", "correction"), [*enumerate(CORRECTIONS)], ids=CORRECTIONS)
def test_the_pull_towards_behaviour(pair, place, correction, shift):
    """Each correction is tried with one micro-batch budget and one normalisation, and with all shifts with each."""
    keys = {"behaviour_coef": 0.3, "normalisation": NORMALISATIONS[(place // 3 + shift) % 3]}
    pair.compare(BUDGETS[(place + shift) % 3], keys | CORRECTIONS[correction])


def test_the_reference_gives_the_same_padded_or_one_sequence_at_a_time(pair):
    alone = ReferenceLearner(pair.policy, settings(make_config(pair.policy, pair.folder)))
    padded = ReferenceLearner(pair.policy, settings(make_config(pair.policy, pair.folder)), padded=True)
    one, other = (learner.gradients(pair.batch.groups, 6) for learner in (alone, padded))
    assert one.loss == pytest.approx(other.loss, rel=0, abs=1e-5 * other.summed)
    for name, value in one.gradients.items():
        assert torch.allclose(value, other.gradients[name], rtol=1e-4, atol=1e-6), name
