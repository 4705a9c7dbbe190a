"""Rewards that see all responses to a prompt: one call, one time limit, and all of the scores or none."""

from pathlib import Path

import msgspec
import pytest

from april.config import ConfigError
from april.workers.rewards.messages import GroupScore, Item, RewardRules
from april.workers.rewards.process import verify
from april.workers.rewards.verifiers import check_verifier, reads_state
from tests.support.reward_scores import collect

GROUP_REWARDS = """
def rank(responses, label, finish_reasons, prompt, tokens):
    order = sorted(range(len(responses)), key=lambda place: abs(len(responses[place]) - int(label)))
    return [(1.0 - order.index(place) / len(order), {"tokens": tokens[place], "prompt": len(prompt)})
            for place in range(len(responses))]

def fewest_calls(responses, label, finish_reasons, states):
    calls = [state["calls"] if state else 0 for state in states]
    return [float(one == min(calls)) for one in calls]

def ended(responses, label, finish_reasons): return [float(reason == "stop") for reason in finish_reasons]
def few(responses, label, finish_reasons): return [1.0]
def one_is_nan(responses, label, finish_reasons): return [0.0, float("nan"), 1.0]
def number(responses, label, finish_reasons): return 1.0
def fail(responses, label, finish_reasons): raise RuntimeError("no such judge")
def loop(responses, label, finish_reasons):
    while True: pass
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "group_rewards.py").write_text(GROUP_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)


def items(name, responses=("aa", "aaaa", "a"), label="3", reason="stop"):
    return [
        Item(place, name, response, label, reason, "prompt", len(response)) for place, response in enumerate(responses)
    ]


def submit(pool, key, function, **keys):
    name = f"group:group_rewards:{function}"
    pool.submit_group(key, name, items(name, **keys))


def test_a_group_verifier_ranks_every_response_with_details(make_pool):
    pool = make_pool(over_limit="failed")
    submit(pool, 7, "rank")
    found = collect(pool, 1)[7]
    assert isinstance(found, GroupScore)
    assert [score.reward for score in found.scores] == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert [score.details for score in found.scores] == [{"tokens": n, "prompt": 6.0} for n in (2.0, 4.0, 1.0)]


def test_a_parameter_states_gets_the_state_of_each_response_or_none():
    name = "group:group_rewards:fewest_calls"
    states = [msgspec.msgpack.encode({"calls": 3}), b"", msgspec.msgpack.encode({"calls": 0})]
    group = [msgspec.structs.replace(item, state=state) for item, state in zip(items(name), states, strict=True)]
    assert [score.reward for score in verify(group, RewardRules())] == [0.0, 1.0, 1.0]
    assert reads_state(name) and not reads_state("group:group_rewards:rank")


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("few", "returned 1 rewards for 3 responses"),
        ("one_is_nan", "not finite"),
        ("number", "TypeError"),
        ("fail", "RuntimeError: no such judge"),
        ("loop", "no answer within 1 s"),
    ],
)
def test_a_group_has_all_of_its_rewards_or_an_error(make_pool, function, reason):
    pool = make_pool(timeout_s=1.0 if function == "loop" else 30.0, over_limit="failed")
    submit(pool, 0, function)
    submit(pool, 1, "ended")
    pool.submit(2, "exact", "a", "a", "stop")
    found = collect(pool, 3)
    assert found[0].reward is None and reason in found[0].error and f"group:group_rewards:{function}" in found[0].error
    assert [score.reward for score in found[1].scores] == [1.0, 1.0, 1.0]
    assert found[2].reward == 1.0


def test_a_group_that_exceeds_the_time_limit_is_wrong_as_a_whole(make_pool):
    pool = make_pool(timeout_s=1.0)
    submit(pool, 0, "loop")
    [score] = collect(pool, 1).values()
    assert [(one.reward, one.details) for one in score.scores] == [(0.0, {"over_limit": 1.0})] * 3


def test_penalties_are_added_to_each_response_of_a_group():
    rules = RewardRules(over_limit="failed", max_response_tokens=4, overlong_buffer_tokens=2, overlong_penalty=0.5)
    scores = verify(items("group:group_rewards:ended"), rules)
    assert [score.reward for score in scores] == [1.0, 0.5, 1.0]
    assert scores[1].details == {"base": 1.0, "overlong": -0.5}


def test_a_verifier_of_single_responses_is_refused_as_a_group_reward():
    check_verifier("group:group_rewards:rank")
    check_verifier("group:remote", url="http://localhost:1")
    for name, reason in (
        ("group:math", "math sees one response at a time"),
        ("group:group_rewards:nothing", "nothing"),
        ("group:unheard_of", "is no verifier"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_verifier(name)
    with pytest.raises(ConfigError, match=r"reward\.url"):
        check_verifier("group:remote")


def test_the_example_of_the_page_prefers_the_shorter_of_the_right_ones(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    examples = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    example = next(code for code in examples if "group:" in code)
    (tmp_path / "page_rewards.py").write_text(example)
    name = "group:page_rewards:shorter_is_better"
    scores = verify(items(name, responses=("it is 33", "no", "3"), label="3"), RewardRules())
    assert [score.reward for score in scores] == [0.75, 0.0, 1.0]
