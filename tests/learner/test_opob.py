"""VCPO's baseline equals its authors' and the reference's, for any micro-batches, ranks and forks."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from april.config import ConfigError
from april.learner.batch import TrainingBatch
from april.learner.losses.advantages import opob
from april.learner.trainer import Trainer
from april.trainers.rollouts.run import check_needs_no_critic
from tests.support.learner.frozen_weights import assert_equals
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import batch_in_turns, flat_batch, job, make_config, settings, uneven_batch
from tests.support.marks import full

GROUPS = orjson.loads((Path(__file__).parents[1] / "support/learner/long_lag_vectors.json").read_bytes())["opob"]
VCPO = {
    "advantage": "opob", "proximal": "recomputed", "corrections": ["truncated_sequence"], "sequence_truncation": 8.0,
    "step_scale": "root_ess",
}  # fmt: skip


def of_groups(key):
    return [torch.tensor(group[key], dtype=torch.float64) for group in GROUPS]


def test_the_baseline_is_that_of_its_authors_and_leaves_the_least_variance():
    rewards, ratios, norms = of_groups("rewards"), of_groups("ratios"), of_groups("norms")
    found = opob(rewards, [ratio.log() for ratio in ratios], [norm.square() for norm in norms])
    for group, reward, ratio, norm, advantages in zip(GROUPS, rewards, ratios, norms, found, strict=True):
        assert (reward - advantages).tolist() == pytest.approx([group["baseline"]] * len(reward), rel=1e-9)
        least = (ratio * norm * advantages).square().sum()
        assert all((ratio * norm * (advantages + off)).square().sum() > least for off in (-1e-3, 1e-3))
    still = opob([torch.tensor([1.0, 0.0])], [torch.zeros(2)], [torch.zeros(2)])
    assert still[0].tolist() == [0.5, -0.5], "no response would move the policy"


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, full(2)])
def test_steps_with_opob_equal_the_reference(policy_folder, tmp_path, ranks):
    """Batches with stale tokens, observations, and a rank without a row of a response."""
    batch = batch_in_turns(policy_folder)
    several = {"algorithm": VCPO | {"corrections": ["m2po"], "m2po_threshold": 0.05}, "minibatches": 2, "epochs": 2}
    configs = [
        make_config(policy_folder, tmp_path / str(place), grad_clip=1e9, microbatch_tokens=64, **keys)
        for place, keys in enumerate(({"algorithm": VCPO}, several))
    ]
    once, often = run_ranks(ranks, [job(config, [batch, batch]) for config in configs], tmp_path / "ranks")
    reference = ReferenceLearner(policy_folder, settings(configs[0]))
    for place, tolerance in enumerate((1e-5, 1e-3)):
        wanted = reference.step(batch.groups, batch.step)
        assert_equals(once["metrics"][place], once["gradients"][place], wanted, tolerance)
    assert often["metrics"][1]["update_skipped"] == 0 < often["metrics"][1]["mask_fraction"] < 1


def test_all_forks_of_a_sample_count_as_one_response(one_rank, policy_folder, tmp_path):
    """A group with forks, next to groups without spread."""
    (first, second, *_), *_ = uneven_batch(0, policy_folder).groups
    fork = replace(second, index=0, fork=1, reward=first.reward)
    group = [replace(first, index=0), fork, replace(second, index=1)]
    config = make_config(policy_folder, tmp_path / "run", algorithm=VCPO)
    trainer, model = Trainer(config, torch.device("cpu")), ReferenceLearner(policy_folder, settings(config))
    ready = trainer.prepare(TrainingBatch(0, [*flat_batch(0).groups, group]))
    trainer.step(TrainingBatch(0, []), ready)
    counts = []
    for rows in ([first, second], [second]):
        logprobs = [model.sample_logprobs(row) for row in rows]
        gradients = torch.autograd.grad(sum(each.sum() for each in logprobs), list(model.lm.parameters()))
        gap = sum((each.detach() - torch.tensor(row.logprobs)).sum() for each, row in zip(logprobs, rows, strict=True))
        counts.append((2 * gap.double()).exp() * sum(gradient.double().square().sum() for gradient in gradients))
    rewards = torch.tensor([first.reward, second.reward], dtype=torch.float64)
    baseline = ((torch.stack(counts) * rewards).sum() / sum(counts)).item()
    wanted = [first.reward - baseline, first.reward - baseline, second.reward - baseline]
    assert ready.prepared.batch_advantages.tolist() == pytest.approx([0.0] * 6 + wanted, rel=1e-5)


def test_opob_is_refused_where_april_computes_no_gradient(policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", algorithm={"advantage": "opob"})
    with pytest.raises(ConfigError, match=r"key 'algorithm.advantage' = 'opob' "):
        check_needs_no_critic(config)
