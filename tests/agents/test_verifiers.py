"""Environments of the package `verifiers`, by name: what they say is read, and their rubric is the reward."""

import asyncio

import orjson
import pytest

from april.agents.host import HostedSession
from april.agents.verifiers_package import Verifiers, write_rows
from april.config import ConfigError

HERE = "tests.support.verifiers_environments"


@pytest.fixture
def play(meet):
    """play(label, *lines, **arguments) -> (reward, what the policy read) of an environment that is loaded with those"""

    def one(label, *lines, **arguments):
        client, policy, _, _ = meet(*lines)
        task = {"messages": [{"role": "user", "content": "12*3="}], "label": label, "group": 3}
        program = Verifiers(HERE, arguments)
        reward = asyncio.run(program(HostedSession(str(client.base_url), client.api_key, task, False)))
        return reward, [text for _, text, _ in policy.requests]

    return one


def test_environment_messages_are_read_and_the_rubric_is_the_reward(play):
    row = orjson.dumps({"example_id": 5, "answer": "1", "info": {"n": 5}}).decode()
    assert play(row, "7$", "8$", "1$", turns=3) == (1.0, ["12*3=", "+5=", "+5="])
    assert play(row, "7$", "8$", "0$", turns=3) == (0.0, ["12*3=", "+5=", "+5="])


def test_a_label_that_is_no_row_of_an_environment_is_the_answer(play):
    assert play("1", "1$") == (1.0, ["12*3="])
    assert play("1", "0$") == (0.0, ["12*3="])


def test_an_answer_without_text_ends_the_conversation_and_is_worth_what_it_is(play):
    assert play("1", "$", turns=3) == (0.0, ["12*3="])


def test_a_rubric_that_raises_is_no_reward(play):
    with pytest.raises(LookupError, match="has lost its notes"):
        play("1", "1$", fails=True)


def test_its_rows_are_written_as_a_dataset_of_april_s(tmp_path):
    train, heldout = write_rows(HERE, {"rows": 5}, tmp_path, 4)
    lines = [orjson.loads(line) for line in train.read_bytes().splitlines()]
    assert len(lines) == 4 and len(heldout.read_bytes().splitlines()) == 2
    assert lines[3]["prompt"] == [{"role": "user", "content": "03*3+60="}]
    assert orjson.loads(lines[3]["label"]) == {"example_id": 3, "answer": "1", "info": {"n": 3}}


@pytest.mark.parametrize("name, says", [("no_such_environment", "Could not import"), (HERE, "unexpected keyword")])
def test_an_environment_that_cannot_be_loaded_is_refused_with_a_sentence(name, says):
    with pytest.raises(ConfigError, match=rf"'agent\.options' = .*{says}.*april-rl\[verifiers\]"):
        Verifiers(name, {"colour": "red"})
