"""PPO with a critic: GAE, the clipped value loss, and a value model trained, saved and resumed like the policy."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from april import config as configuration
from april.config import ConfigError
from april.config.checks import check_algorithms
from april.config.training import CriticSection
from april.learner.batch import TrainingBatch
from april.learner.critic import value_losses
from april.learner.losses.columns import Spans
from april.learner.losses.gae import gae
from april.learner.packing import minibatches
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.reference_critic import CriticReference
from tests.support.learner.reference_critic import gae as gae_of_the_paper
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import (
    SHIPPED,
    batch_in_turns,
    full_moments,
    job,
    make_config,
    set_head,
    uneven_batch,
    whole_critic,
)

CPU = torch.device("cpu")
PPO = SHIPPED | {"advantage": "gae"}
CRITIC = {"lr": 3e-3, "gamma": 0.97, "lam": 0.9}


def spans(*lengths):
    return Spans(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.tensor(lengths).float())


# --- formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_gae_is_the_sum_of_the_paper_response_by_response(gamma, lam):
    lengths, generator = (1, 7, 2, 30), torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, sum(lengths), generator=generator)
    found = gae(rewards, values, spans(*lengths), CriticSection(gamma=gamma, lam=lam))
    columns = zip(rewards.split(lengths), values.split(lengths), strict=True)
    wanted = [a for reward, value in columns for a in gae_of_the_paper(reward.tolist(), value.tolist(), gamma, lam)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_the_value_loss_and_its_clip_by_hand():
    values = torch.tensor([1.0, 1.5, 1.5, 0.5], requires_grad=True)
    before, returns = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([3.0, 3.0, 0.0, 0.75])
    # 1.5 is held at 1.2 where that is the larger error: on the way to 3 it is, on the way from 0 it is not
    losses, held = value_losses(values, before, returns, 0.2)
    assert losses.tolist() == pytest.approx([2.0, 1.62, 1.125, 0.03125])
    assert held.tolist() == [False, True, False, False]
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-2.0, 0.0, 1.5, -0.25])
    assert value_losses(values.detach(), before, returns, 0.0)[0].tolist() == pytest.approx([2, 1.125, 1.125, 0.03125])


# --- the pipeline -------------------------------------------------------------------------------------------


def same(found: dict, wanted: dict, tolerance: float) -> None:
    largest = max(value.abs().max().item() for value in wanted.values())
    for name, value in wanted.items():
        off = (found[name] - value).abs().max().item()
        assert off <= tolerance * largest, f"{name}: off by {off} where gradients reach {largest}"


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_and_critic_are_those_of_the_reference(policy_folder, tmp_path, ranks):
    """Batches with stale tokens, observations, KL in the reward, and values outside their clip."""
    batch, budget = batch_in_turns(policy_folder), {"microbatch_tokens": 64, "grad_clip": 1e9}
    once = make_config(policy_folder, tmp_path / "once", algorithm=PPO, critic=CRITIC | {"grad_clip": 1e9}, **budget)
    harder = {"kl_coef": 0.5, "value_clip": 0.02}
    often = make_config(
        policy_folder, tmp_path / "often", algorithm=PPO, critic=CRITIC | harder, lr=3e-3, minibatches=2, epochs=2,
        microbatch_tokens=64,
    )  # fmt: skip
    jobs = [job(once, [batch], set_head=True), job(often, [batch, batch])]
    one, several = run_ranks(ranks, jobs, tmp_path / "ranks")
    reference = CriticReference(policy_folder, once, random_head=True)
    wanted = reference.step(batch.groups, batch.step)
    assert one["metrics"][0]["loss"] == pytest.approx(wanted.loss, abs=1e-5)
    same(one["gradients"][0], wanted.gradients, 1e-5)
    same(one["critic"]["gradients"][0], {name: p.grad for name, p in reference.parameters.items()}, 1e-5)
    reference = CriticReference(policy_folder, often)
    of_group = minibatches(4, 2, random.Random(f"{often.seed} {batch.step}"))
    order = [[place for place in range(4) if of_group[place] == number] for number in range(2)]
    for _ in range(2):
        reference.step(batch.groups, batch.step, order, epochs=2)
    metrics = several["metrics"][1]
    assert metrics["value_clip_fraction"] > 0 and metrics["reward"] != metrics["return_mean"]
    found = several["weights"] | several["critic"]["weights"]
    for name, parameter in [*reference.lm.named_parameters(), *reference.parameters.items()]:
        off = (found[name] - parameter.detach()).abs()
        assert off.mean() < 2e-3 * often.learner.lr and off.max() < 0.3 * often.learner.lr, name


def test_restored_ranks_continue_bitwise_with_their_critic(policy_folder, tmp_path, one_rank):
    config = make_config(
        policy_folder, tmp_path / "run", algorithm=PPO, critic=CRITIC | {"warmup_batches": 1}, microbatch_tokens=64,
        minibatches=2, keep_checkpoints=2,
    )  # fmt: skip
    batches = [uneven_batch(step, policy_folder) for step in range(3)]
    jobs = [job(config, batches, save_after=[2]), job(config, batches[2:], restore=True)]
    whole, resumed = run_ranks(2, jobs, tmp_path / "ranks")
    assert (resumed["restored"], resumed["optimizer_steps"], whole["optimizer_steps"]) == (2, 4, 4)
    for part in ("weights", "moments"):
        for of_whole, of_resumed in ((whole, resumed), (whole["critic"], resumed["critic"])):
            assert_bitwise(of_whole[part], of_resumed[part])
    seen = [[(each["loss"], each["value_loss"]) for each in result["metrics"]] for result in (whole, resumed)]
    assert seen[0][2:] == seen[1]
    alone = Trainer(config, CPU)
    assert (alone.restore(), alone.critic.part.steps, alone.optimizer_steps) == (2, 4, 2)
    assert len(full_moments(alone.critic.part)) == len(whole["critic"]["moments"])


def assert_bitwise(one, other) -> None:
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_bitwise(*pair)
    else:
        assert one.keys() == other.keys()
        assert equal(one, other)


@pytest.fixture
def trainer(one_rank, policy_folder, tmp_path):
    trainer = Trainer(make_config(policy_folder, tmp_path / "run", algorithm=PPO, critic=CRITIC), CPU)
    set_head(trainer)
    return trainer


@pytest.mark.parametrize("broken", ["logprobs", "reward", "critic"])
def test_a_batch_that_is_not_finite_changes_neither_policy_nor_critic(trainer, policy_folder, broken, monkeypatch):
    good = uneven_batch(0, policy_folder)
    trainer.step(good)
    before = trainer.weights() | whole_critic(trainer)
    first, *rest = good.groups[0]
    if broken == "logprobs":
        first = replace(first, logprobs=np.full_like(first.logprobs, np.nan))
    elif broken == "reward":
        first = replace(first, reward=math.nan)
    else:
        monkeypatch.setattr(trainer.critic, "finish_step", lambda: {"value_loss": math.inf})
    metrics = trainer.step(TrainingBatch(1, [[first, *rest], *good.groups[1:]]))
    assert (metrics["nonfinite"], metrics["update_skipped"]) == (1, 1)
    assert (trainer.optimizer_steps, trainer.critic.part.steps, trainer.step_count) == (1, 1, 2)
    assert_bitwise(trainer.weights() | whole_critic(trainer), before)


def test_warmup_batches_train_the_critic_alone(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", algorithm=PPO, critic=CRITIC | {"warmup_batches": 1})
    trainer = Trainer(config, CPU)
    policy, critic = trainer.weights(), whole_critic(trainer)
    metrics = trainer.step(uneven_batch(0, policy_folder))
    assert (metrics["nonfinite"], metrics["update_skipped"], metrics["grad_norm"]) == (0, 1, 0)
    assert metrics["critic_grad_norm"] > 0 and metrics["entropy"] > 0
    assert_bitwise(trainer.weights(), policy)
    assert not torch.equal(whole_critic(trainer)["head"], critic["head"])
    assert trainer.step(uneven_batch(1, policy_folder))["update_skipped"] == 0
    assert any(not torch.equal(value, policy[name]) for name, value in trainer.weights().items())


def test_a_checkpoint_without_a_critic_is_refused(one_rank, policy_folder, tmp_path):
    Trainer(make_config(policy_folder, tmp_path / "run"), CPU).save()
    trainer = Trainer(make_config(policy_folder, tmp_path / "run", algorithm=PPO), CPU)
    with pytest.raises(ConfigError, match=r"key 'algorithm.advantage' "):
        trainer.restore()


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys, refusal",
    [
        ({"critic": {"gamma": 0.9}}, "key 'critic.gamma' = 0.9 "),
        ({"schedule": {"n_samples_per_prompt": 1}}, "key 'schedule.n_samples_per_prompt' = 1 "),
        ({"algorithm": {"advantage": "gae", "kl_coef": 0.1}, "critic": {"kl_coef": 0.2}}, "'critic.kl_coef' = 0.2 "),
        (
            {"algorithm": {"advantage": "gae"}, "critic": {"warmup_batches": 9}, "schedule": {"max_steps": 9}},
            "key 'critic.warmup_batches' = 9 ",
        ),
    ],
)  # fmt: skip
def test_keys_that_make_no_sense_are_refused(keys, refusal):
    config = configuration.Config.model_validate({"model": {"path": "x"}, "data": {"path": "y"}, **keys})
    with pytest.raises(ConfigError, match=refusal):
        check_algorithms(config)


def test_a_critic_allows_groups_of_one_and_a_custom_estimator_is_checked_on_import():
    tree = {"model": {"path": "x"}, "data": {"path": "y"}, "schedule": {"n_samples_per_prompt": 1}}
    check_algorithms(configuration.Config.model_validate(tree | {"algorithm": {"advantage": "gae"}}))
    own = configuration.Config.model_validate(tree | {"algorithm": {"advantage": "tests.learner.test_critic:own"}})
    check_algorithms(own)
    with pytest.raises(ConfigError, match=r"key 'schedule.n_samples_per_prompt' = 1 "):
        check_algorithms(own, imported=True)


def own(rewards, lengths):
    """An advantage estimator that needs no critic."""
    return rewards
