"""Credit by turn: what a turn's tokens learn from its reward, those of later turns and the reward of the response."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from april.config import Config, ConfigError
from april.config.checks import check
from april.learner.batch import TrainingBatch, decode, encode
from april.learner.critic import Critic
from april.learner.losses.advantages import grpo
from april.learner.losses.gae import gae
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective
from april.learner.turns import turn_rewards, turns_of
from april.wire.message import Version
from tests.support.learner.small_learner import make_sample

NAME = "step_reward"
TURNS = (((2, 3), (6, 4)), ((1, 1), (4, 2), (7, 3)), ((3, 5),), ((2, 2), (6, 1)))
"""(start, tokens) of the turns of each response; between them are observations."""


def sample_of(rng, turns, rewards, reward, cut=False):
    """A response whose turns have these rewards; `cut`: each longer turn was sampled under two versions."""
    length = turns[-1][0] + turns[-1][1] + 1
    segments = []
    for start, size in turns:
        middle = start + size // 2
        spans = [(start, middle), (middle, start + size)] if cut and size > 1 else [(start, start + size)]
        segments += [(*span, Version(0, number)) for number, span in enumerate(spans)]
    column = np.zeros(length, np.float32)
    for (start, size), value in zip(turns, rewards, strict=True):
        column[start : start + size] = value
    plain = make_sample(rng, 2, length, reward)
    return replace(plain, segments=tuple(segments), token_scores={NAME: column})


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=len(turns)).astype(np.float32).tolist() for turns in TURNS]
    samples = [
        sample_of(rng, turns, given, float(index % 2), cut=index == 1)
        for index, (turns, given) in enumerate(zip(TURNS, rewards, strict=True))
    ]
    return rewards, TrainingBatch(1, [samples[:3], [samples[3], replace(samples[2], token_scores={})]])


def made(**algorithm):
    tree = {"model": {"path": Path()}, "data": {"path": "rows.jsonl"}}
    return Config.model_validate(tree | {"algorithm": {"turn_reward": NAME} | algorithm})


def returns(rewards, outcome, discount):
    """By definition: each turn with the discounted rewards of those after it, and of the response."""
    gained = [*rewards[:-1], rewards[-1] + outcome]
    return [sum(discount ** (s - t) * gained[s] for s in range(t, len(gained))) for t in range(len(gained))]


def test_a_turn_is_what_was_sampled_between_observations_whatever_the_versions(batch):
    _, received = batch
    assert [turns_of(sample) for sample in received.groups[0]] == [
        [(0, 3), (3, 7)], [(0, 1), (1, 3), (3, 6)], [(0, 5)],
    ]  # fmt: skip
    empty = make_sample(np.random.default_rng(0), 2, 0, 1.0)
    assert (turns_of(empty), turn_rewards(empty, NAME).tolist()) == ([(0, 0)], [0.0])


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_every_turn_is_compared_with_all_turns_of_its_group_by_its_return(batch, estimator, discount):
    rewards, received = batch
    objective = Objective(made(advantage=estimator, turn_discount=discount), SingleRank())
    prepared = objective.prepare(decode(encode(received)))
    found = objective.tokens(prepared, list(range(len(prepared.samples))), torch.device("cpu")).advantages
    expected = []
    for group, given in ((received.groups[0], rewards[:3]), (received.groups[1], [rewards[3], [0.0]])):
        of_group = [returns(one, sample.reward, discount) for one, sample in zip(given, group, strict=True)]
        pooled = np.concatenate(of_group)
        scale = pooled.std(ddof=1) if estimator == "grpo" else 1.0
        for sample, each in zip(group, of_group, strict=True):
            sizes = [end - start for start, end in turns_of(sample)]
            expected.append(np.repeat((np.array(each) - pooled.mean()) / scale, sizes))
    np.testing.assert_allclose(
        np.concatenate(prepared.token_advantages), np.concatenate(expected), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-6)
    np.testing.assert_allclose(prepared.batch_advantages, [each.mean() for each in expected], rtol=1e-9)
    assert prepared.metrics["turn_rewards_known"] == 0.8


def test_with_one_turn_each_it_is_the_advantage_of_the_response():
    rng = np.random.default_rng(1)
    samples = [sample_of(rng, ((0, 4),), [0.0], reward) for reward in (1.0, 0.0, 0.5)]
    prepared = Objective(made(), SingleRank()).prepare(TrainingBatch(1, [samples]))
    assert (
        prepared.batch_advantages.tolist() == grpo([torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)], [])[0].tolist()
    )


@pytest.mark.parametrize("discount", [1.0, 0.3])
def test_a_critic_sees_a_turn_s_reward_at_its_last_token_and_discounts_at_the_ends_of_turns(batch, discount):
    rewards, received = batch
    config = made(advantage="gae", turn_discount=discount)
    section = config.critic.model_copy(update={"gamma": 0.9, "lam": 0.8})
    objective = Objective(config, SingleRank())
    prepared = objective.prepare(received)
    tokens = objective.tokens(prepared, [1], torch.device("cpu"))
    values = np.random.default_rng(2).normal(size=6)
    scores = {**tokens.scores, "values": torch.from_numpy(values)}
    tokens = replace(tokens, rewards=tokens.rewards.double(), scores=scores)
    critic = Critic.__new__(Critic)
    critic.section, critic.estimator, critic.turn_discount = section, gae, discount
    gained, discounts = np.zeros(6), np.full(6, 0.9)
    for (_, end), reward in zip(turns_of(received.groups[0][1]), rewards[1], strict=True):
        gained[end - 1] += reward
        discounts[end - 1] *= discount
    gained[-1] += received.groups[0][1].reward
    expected, after, value_after = np.zeros(6), 0.0, 0.0
    for t in reversed(range(6)):
        error = gained[t] + discounts[t] * value_after - values[t]
        expected[t] = after = error + discounts[t] * 0.8 * after
        value_after = values[t]
    np.testing.assert_allclose(critic.advantages(tokens), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("discount", [1e-12, 0.01, 0.9])
def test_a_critic_s_advantages_are_finite_and_exact_where_the_discount_of_all_turns_underflows(discount):
    turns, rewards = 200, np.random.default_rng(4).normal(size=200)
    sample = sample_of(np.random.default_rng(3), [(4 * turn, 3) for turn in range(turns)], rewards, 1.0)
    objective = Objective(made(advantage="gae", turn_discount=discount), SingleRank())
    tokens = objective.tokens(objective.prepare(TrainingBatch(1, [[sample]])), [0], torch.device("cpu"))
    critic = Critic.__new__(Critic)
    critic.section = made().critic.model_copy(update={"gamma": 1.0, "lam": 1.0})
    critic.estimator, critic.turn_discount = gae, discount
    scores = {**tokens.scores, "values": torch.zeros(3 * turns, dtype=torch.float64)}
    tokens = replace(tokens, rewards=tokens.rewards.double(), scores=scores)
    expected = np.repeat(returns(np.float32(rewards).astype(float).tolist(), 1.0, discount), 3)
    np.testing.assert_allclose(critic.advantages(tokens), expected, rtol=1e-9, atol=1e-9)


REFUSED = {
    "'algorithm.turn_reward' = 'step_reward' credits turns": {"algorithm": {"advantage": "opob"}},
    "'algorithm.turn_reward' = 'step_reward' is not given to sessions": {"agent": {"program": "mine:agent"}},
    "'algorithm.length_penalty' = 'kimi' compares whole responses": {"algorithm": {"length_penalty": "kimi"}},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_turns_or_compares_whole_responses_is_refused(why):
    tree = {"model": {"path": Path()}, "data": {"path": "rows.jsonl"}} | REFUSED[why]
    tree["algorithm"] = {"turn_reward": NAME} | tree.get("algorithm", {})
    with pytest.raises(ConfigError, match=why):
        check(Config.model_validate(tree), inputs=())
