"""Alarms: raised by what they are about, with a sentence, after a restart as before, and not otherwise."""

import orjson
import pytest

from april import config as configuration
from april.report.live import step_line
from tests.broker.conversation import Conversation
from tests.broker.test_steps import train

EMPTY = {"tokens": 40.0, "groups": 4.0, "trained_tokens": 0.0, "gradient_groups": 0.0}
HALF = EMPTY | {"trained_tokens": 20.0, "gradient_groups": 1.0}


@pytest.fixture
def talk(config_file):
    return Conversation(configuration.load(config_file, ["--evaluation.prompts", "1", "--schedule.max_steps", "8"]))


def lines(talk):
    return [orjson.loads(line) for line in (talk.config.run_dir / "metrics.jsonl").read_bytes().splitlines()]


def test_three_steps_in_a_row_without_a_gradient_raise_an_alarm_that_says_what_to_do(talk, worker, learner):
    plain = learner.consume
    for step, figures in enumerate((EMPTY, EMPTY, HALF, EMPTY, EMPTY, EMPTY)):
        learner.consume = lambda step, figures=figures: plain(step, **figures)
        train(talk, worker, learner, step)
    raised = [line["alarms"] for line in lines(talk)]
    assert [len(alarms) for alarms in raised] == [0, 0, 0, 0, 0, 1]
    [alarm] = raised[-1]
    assert alarm["sentence"].startswith("nothing was trained in the last 3 steps") and alarm["page"].endswith("badly")
    assert lines(talk)[2]["gradient"] == {"tokens": 0.5, "groups": 0.25}
    assert "gradient 50%" in step_line(lines(talk)[2], {})


def test_an_engine_that_did_not_hold_its_weights_raises_an_alarm_in_that_step(talk, worker, learner):
    plain = learner.consume
    for step, wrong in enumerate((0.0, 2.0, 0.0)):
        learner.consume = lambda step, wrong=wrong: plain(step, **HALF, publish_wrong=wrong)
        train(talk, worker, learner, step)
    raised = [line["alarms"] for line in lines(talk)]
    assert [[alarm["name"] for alarm in alarms] for alarms in raised] == [[], ["wrong_weights"], []]
    assert "did not hold the weights" in raised[1][0]["sentence"] and raised[1][0]["page"].endswith("#proof-of-weights")
