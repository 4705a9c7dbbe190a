"""Environments of the package `gymnasium`, by name: what they show is read, and what they give is the reward."""

import asyncio
import threading

import gymnasium
import pytest

from april.agents.gymnasium import Gymnasium, text_of
from april.agents.host import HostedSession
from april.config import ConfigError

LAKE = {"name": "FrozenLake-v1", "arguments": {"is_slippery": False}}
"""4 x 4 places from 0 to 15, where 5, 7, 11 and 12 are holes; actions 0 left, 1 down, 2 right, 3 up"""

pytestmark = pytest.mark.full


@pytest.fixture
def play(meet):
    """play(*lines, **options) -> (reward, what the policy read)"""

    def one(*lines, max_tokens=64, **options):
        client, policy, _, _ = meet(*lines, max_tokens=max_tokens)
        task = {"messages": [{"role": "user", "content": "12*3="}], "label": "63", "group": 3}
        program = Gymnasium(**LAKE | {"reminder": "+"} | options)
        reward = asyncio.run(program(HostedSession(str(client.base_url), client.api_key, task, False)))
        return reward, [text for _, text, _ in policy.requests]

    return one


def test_observations_are_read_and_the_sum_of_rewards_is_the_reward(play):
    down, right = "5+1$", "2$"
    reward, read = play(down, down, right, down, right, right)
    assert reward == 1.0 and read[1:] == ["4", "8", "9", "13", "14"] and read[0].startswith("12*3=")
    assert play(down, right)[0] == 0.0, "a hole"


def test_an_answer_without_an_action_gets_the_reminder_and_turns_and_context_are_bounded(play):
    assert play("7$", "12$", "1$", turns=3)[1][1:] == ["+", "+"]
    assert play("1$", "1$", max_tokens=13) == (0.0, ["12*3=0", "4"])


class Stuck(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(2)
    in_step, may_go_on = threading.Event(), threading.Event()

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.in_step.set()
        self.may_go_on.wait()
        return 0, 1.0, True, False, {}


def test_a_step_that_hangs_outlives_its_cancellation_so_that_its_process_is_ended(meet):
    gymnasium.register("Stuck-v0", Stuck, disable_env_checker=True)
    client, _, _, _ = meet("1$")
    task = {"messages": [{"role": "user", "content": "12*3="}], "label": "63", "group": 3}

    async def play():
        playing = asyncio.create_task(
            Gymnasium("Stuck-v0")(HostedSession(str(client.base_url), client.api_key, task, False))
        )
        await asyncio.to_thread(Stuck.in_step.wait)
        playing.cancel()
        done, _ = await asyncio.wait([playing], timeout=0.2)
        assert not done
        Stuck.may_go_on.set()
        await asyncio.wait([playing])
        return playing.cancelled()

    assert asyncio.run(play())


def test_words_stand_for_actions_and_a_drawing_for_colours():
    program = Gymnasium(**LAKE, actions=["left", "down", "right", "up"])
    assert [program._parse_action(said) for said in ("Go UP, then left.", "upright", "(right)")] == [0, None, 2]
    environment = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    observation, _ = environment.reset(seed=0)
    assert text_of(environment, observation).startswith("[S]FFF\nFHFH")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"name": "NoSuchLake-v1"}, "makes no environment: .*NoSuchLake"),
        ({"arguments": {"colour": "red"}}, "makes no environment: .*colour"),
        ({"actions": ["left", "right"]}, "has 4 actions, and 'actions' = .* names 2"),
        ({"name": "Pendulum-v1", "arguments": {}}, "has actions that no word names, Box"),
    ],
)
def test_an_unusable_environment_is_refused_with_a_sentence(options, says):
    with pytest.raises(ConfigError, match=rf"'agent.options' = .*{says}"):
        Gymnasium(**LAKE | options)
