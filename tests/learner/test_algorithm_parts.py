"""Advantages that need passes of their own, a critic's or the gradient of each response, in one part of a batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from april.config.data import DataSection, SourceSection
from april.learner.batch import TrainingBatch
from april.learner.trainer import Trainer
from tests.support.learner.small_learner import make_config, uneven_batch

PARTS = {"gae": {"advantage": "gae"}, "opob": {"advantage": "opob"}, "rloo": {"advantage": "rloo"}}


def gradients(config, batch):
    """{name: gradient} of policy, and of the critic if there is one, in the first optimizer step; the metrics; and the
    advantage of each row."""
    trainer, found = Trainer(config, torch.device("cpu")), {}

    def keep(model):
        for name, parameter in model.trained:
            gradient = parameter.grad
            found[f"{type(model).__name__}.{name}"] = (
                gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            ).clone()

    trainer.update = lambda lr: keep(trainer.policy)
    if trainer.critic:
        trainer.critic.update = lambda: keep(trainer.critic.model)
    ready = trainer.prepare(batch)
    return found, trainer.step(batch, ready), ready.prepared.batch_advantages


def of_sources(config, first, second):
    """`config` with two sources, of which the second has an algorithm of its own."""
    sources = [SourceSection(path="a.jsonl"), SourceSection(path="b.jsonl", algorithm=PARTS[second])]
    algorithm = config.algorithm.model_copy(update=PARTS[first])
    return config.model_copy(update={"data": DataSection(sources=sources), "algorithm": algorithm})


@pytest.mark.parametrize("first, second", [("rloo", "gae"), ("gae", "rloo"), ("opob", "rloo"), ("opob", "gae")])
def test_a_part_is_trained_as_if_it_were_alone_times_its_share(one_rank, policy_folder, tmp_path, first, second):
    plain = make_config(policy_folder, tmp_path / "run", grad_clip=1e9, critic={}, microbatch_tokens=64)
    critic = plain.critic.model_copy(update={"grad_clip": 1e9, "gamma": 0.95, "lam": 0.9})
    plain = plain.model_copy(update={"critic": critic})
    groups = uneven_batch(0, policy_folder).groups
    given = [[replace(sample, source=int(number == 1)) for sample in group] for number, group in enumerate(groups)]
    both, metrics, advantages = gradients(of_sources(plain, first, second), TrainingBatch(0, given))
    expected, rows = {}, np.split(np.arange(sum(map(len, groups))), np.cumsum([*map(len, groups)])[:-1])
    for name, part in ((first, [0, 2, 3]), (second, [1])):
        alone = plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update=PARTS[name])})
        found, _, of_part = gradients(alone, TrainingBatch(0, [groups[number] for number in part]))
        assert advantages[np.concatenate([rows[number] for number in part])] == pytest.approx(of_part, abs=1e-5)
        for key, gradient in found.items():
            expected[key] = expected.get(key, 0) + len(part) / 4 * gradient
    assert both.keys() == expected.keys()
    for key, gradient in both.items():
        assert (gradient - expected[key]).abs().max() < 1e-5 * max(1.0, float(gradient.abs().max())), key
    assert ("value_loss" in metrics) == ("gae" in (first, second))


def test_a_critic_rests_in_a_batch_without_samples_of_its_part(one_rank, policy_folder, tmp_path):
    config = of_sources(make_config(policy_folder, tmp_path / "run"), "rloo", "gae")
    trainer = Trainer(config, torch.device("cpu"))
    metrics = trainer.step(TrainingBatch(0, uneven_batch(0, policy_folder).groups))
    assert trainer.part.steps == 1 and trainer.critic.part.steps == 0 and metrics["critic_grad_norm"] == 0
