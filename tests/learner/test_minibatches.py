"""Several optimizer steps a batch equal the reference's, around a proximal policy fixed at delivery."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from april.learner import objective
from april.learner.batch import TrainingBatch
from april.learner.objective import SCORING_PASSES, ScoringPass
from april.learner.packing import minibatches
from april.learner.trainer import Trainer
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import SHIPPED, job, make_config, settings, stale_batch, uneven_batch


@pytest.mark.parametrize("groups, count", [*product(range(6), (1, 2, 3, 7))])
def test_each_group_is_in_one_minibatch_and_they_are_of_one_size(groups, count):
    of_group = minibatches(groups, count, random.Random(0))
    assert len(of_group) == groups
    sizes = np.bincount(of_group, minlength=min(count, groups))
    assert len(sizes) == min(count, groups) and (groups == 0 or sizes.max() - sizes.min() <= 1)
    assert of_group == minibatches(groups, count, random.Random(0))


def test_minibatches_are_shuffled_anew_for_each_batch():
    assert len({tuple(minibatches(8, 4, random.Random(seed))) for seed in range(20)}) > 10


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_those_of_the_reference_s_steps(policy_folder, tmp_path, ranks):
    """Batches with stale tokens, a group without spread in its own minibatch, and a ratio that is clipped."""
    config = make_config(
        policy_folder, tmp_path / "run", algorithm=SHIPPED, lr=3e-3, minibatches=4, epochs=3, microbatch_tokens=64
    )
    batch = stale_batch(policy_folder)
    result, again = run_ranks(ranks, [job(config, [batch]), job(config, [batch])], tmp_path)
    reference = ReferenceLearner(policy_folder, settings(config))
    of_group = minibatches(4, 4, random.Random(f"{config.seed} {batch.step}"))
    order = [[of_group.index(number)] for number in range(4)]
    reference.step(batch.groups, batch.step, order, epochs=3)
    metrics = result["metrics"][0]
    assert result["optimizer_steps"] == 9 and metrics["update_skipped"] == 1 / 4 and metrics["clip_fraction"] > 0
    for name, parameter in reference.lm.named_parameters():
        off = (result["weights"][name] - parameter.detach()).abs()
        assert off.mean() < 1e-3 * config.learner.lr and off.max() < 0.2 * config.learner.lr, name
        assert torch.equal(result["weights"][name], again["weights"][name]), "the same batch gives the same weights"


def test_token_metrics_are_under_the_weights_at_delivery(one_rank, policy_folder, tmp_path):
    batch, found = uneven_batch(0, policy_folder), []
    for steps in ({}, {"minibatches": 2, "epochs": 2}):
        trainer = Trainer(make_config(policy_folder, tmp_path / "run", algorithm=SHIPPED, **steps), torch.device("cpu"))
        metrics = trainer.step(batch)
        figures = ("trained_tokens", "tokens", "off_policy_share", "weight_mean", "truncated_fraction")
        found.append(({name: metrics[name] for name in figures}, trainer.token_stats.per_sample()))
    (once, seen), (often, seen_often) = found
    assert often == pytest.approx(once, rel=1e-6)
    for one, other in zip(seen, seen_often, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_each_scoring_pass_is_made_once_a_batch_and_a_further_one_is_an_entry_of_the_list(
    one_rank, policy_folder, tmp_path, monkeypatch
):
    teacher = ScoringPass(("teacher_logprobs",), "teacher", lambda objective: True, "forward_s", "scoring by a teacher")
    monkeypatch.setattr(objective, "SCORING_PASSES", (*SCORING_PASSES, teacher))
    config = make_config(policy_folder, tmp_path / "run", algorithm={"kl_coef": 0.1}, minibatches=2, epochs=2)
    trainer, made, seen = Trainer(config, torch.device("cpu")), [], []
    trainer.scorers["teacher"] = trainer.scorers["reference"]
    for model, scorer in trainer.scorers.items():
        trainer.scorers[model] = lambda micros, model=model, scorer=scorer: [made.append(model), *scorer(micros)][1:]
    (only,) = trainer.algorithms.objectives
    loss = only.loss
    monkeypatch.setattr(only, "loss", lambda *inputs: [seen.append(inputs[2].scores), loss(*inputs)][1])
    trainer.step(uneven_batch(0, policy_folder))
    assert made == ["policy", "reference", "teacher"] and len(seen) >= 4
    assert all(torch.equal(scores["teacher_logprobs"], scores["reference_logprobs"]) for scores in seen)


def test_a_nonfinite_minibatch_skips_only_its_own_step(one_rank, policy_folder, tmp_path):
    batch = uneven_batch(0, policy_folder)
    first, *others = batch.groups
    broken = [replace(sample, logprobs=np.full_like(sample.logprobs, np.nan)) for sample in first]
    steps = {"minibatches": 2, "epochs": 2}
    trainer = Trainer(make_config(policy_folder, tmp_path / "run", algorithm=SHIPPED, **steps), torch.device("cpu"))
    metrics = trainer.step(TrainingBatch(0, [broken, *others]))
    assert (metrics["update_skipped"], metrics["nonfinite"], trainer.optimizer_steps) == (0.5, 0, 2)
    metrics = trainer.step(TrainingBatch(1, [broken]))
    assert (metrics["update_skipped"], metrics["nonfinite"], trainer.step_count) == (1, 1, 2)
    assert all(value.isfinite().all() for value in trainer.weights().values())
