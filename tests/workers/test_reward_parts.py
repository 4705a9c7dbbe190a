"""A reward of several parts: each value is a detail, and the reward is their weighted sum."""

import os

import msgspec
import pytest

from april.util.pool import frame
from april.workers.rewards.messages import Item, RewardPart, RewardRules
from april.workers.rewards.pool import RewardPool
from april.workers.rewards.process import ItemReader, undecided, verify
from tests.support.reward_scores import collect


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "parts_of_mine.py").write_text(
        "def graded(response, label): return float(label in response), {'words': len(response.split())}\n"
        "def sixteen(response): return 1.0, {f'd{i}': 1.0 for i in range(16)}\n"
        "def brief(tokens): return -float(tokens)\n"
        "def fail(response): raise RuntimeError('no such unit')\n"
        "def nan(response): return float('nan')\n"
        "def loop(response):\n"
        "    while True: pass\n"
        "loop.wrong = -2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def rules_of(name="parts_of_mine:graded", **parts):
    return RewardRules(name=name, parts={part: RewardPart(**keys) for part, keys in parts.items()})


def item_of(response, verifier="parts_of_mine:graded", key=0):
    return Item(key, verifier, response, "7", "stop", tokens=len(response))


BRIEF = {"verifier": "parts_of_mine:brief", "weight": 0.5}


def test_a_part_is_a_verifier_s_reward_a_detail_or_the_own_reward_and_the_reward_is_their_weighted_sum():
    rules = rules_of(reward={"weight": 2.0}, words={"weight": 0.1}, brief=BRIEF)
    [score] = verify([item_of("it is 7")], rules)
    assert score.details == {"reward": 1.0, "words": 3.0, "brief": -7.0, "over_limit": 0.0}
    assert score.reward == pytest.approx(2.0 * 1.0 + 0.1 * 3.0 + 0.5 * -7.0)


def test_a_gated_part_counts_only_where_the_gate_s_value_is_above_its_limit():
    rules = rules_of(reward={}, brief=BRIEF | {"gate": "reward", "gate_above": 0.5})
    right, wrong = verify([item_of("7"), item_of("8888", key=1)], rules)
    assert (right.reward, right.details["brief"]) == (1.0 - 0.5, -1.0)
    assert (wrong.reward, wrong.details["brief"]) == (0.0, 0.0)


def test_penalties_are_added_or_parts_with_a_weight_and_a_gate():
    keys = {"overlong_buffer_tokens": 4, "max_response_tokens": 8}
    for parts, expected in (
        ({"reward": {}}, 1.0 - 0.5),
        ({"reward": {}, "overlong": {"weight": 3.0}}, 1.0 - 1.5),
        ({"reward": {}, "overlong": {"gate": "reward", "gate_above": 1.0}}, 1.0),
    ):
        rules = msgspec.structs.replace(rules_of(**parts), **keys)
        [score] = verify([item_of("is 7 !")], rules)
        assert (score.reward, score.details["base"]) == (expected, 1.0)


def test_the_run_s_verifier_is_not_called_if_no_part_is_its():
    [score] = verify([item_of("7", "parts_of_mine:fail")], rules_of("parts_of_mine:fail", brief=BRIEF))
    assert score.reward == -0.5


def test_a_row_with_a_verifier_of_its_own_has_that_reward_alone():
    [score] = verify([item_of("7", "exact")], rules_of(reward={}, brief=BRIEF))
    assert (score.reward, score.details["correct"]) == (1.0, 1.0) and "brief" not in score.details


@pytest.mark.parametrize("part, why", {
    "fail": "verifier 'parts_of_mine:fail': RuntimeError: no such unit", "nan": "returned nan, which is not finite",
    "": "gave no detail 'part', which is a part of the reward",
}.items())  # fmt: skip
def test_a_part_without_a_number_is_an_error_and_never_a_zero(part, why):
    rules = rules_of(reward={}, part={"verifier": f"parts_of_mine:{part}" if part else ""})
    [score] = verify([item_of("7")], rules)
    assert score.reward is None and why in score.error


def test_a_score_that_its_parts_make_unacceptable_to_the_broker_is_an_error():
    many = rules_of("parts_of_mine:sixteen", reward={})
    [score] = verify([item_of("7", many.name)], many)
    assert score.reward is None and "with its parts and penalties returned 18 details, more than 16" in score.error
    [score] = verify([item_of("7")], rules_of(reward={"weight": 1e300}))
    assert score.reward is None and "returned 1e+300, which is larger than 1e+09" in score.error


def test_responses_are_scored_in_one_call_only_if_all_verifiers_of_their_parts_take_many():
    for part, expected in (("", True), ("remote", True), ("code", False)):
        rules = rules_of("remote", reward={}, part={"verifier": part} if part else {"gate": "reward"})
        pool, item = RewardPool.__new__(RewardPool), item_of("7", "remote")
        pool.rules = rules
        assert pool.joins(item, [item]) is expected
        reading, writing = os.pipe()
        os.write(writing, frame(item) + frame(item))
        assert len(ItemReader(reading, rules).take()) == (2 if expected else 1)
        os.close(reading), os.close(writing)


def test_a_response_that_a_part_cannot_decide_is_wrong_in_all_parts(make_pool):
    parts = {"correct": {}, "brief": BRIEF, "slow": {"verifier": "parts_of_mine:loop"}}
    rules = rules_of("exact", **parts)
    pool = make_pool(timeout_s=1.0, name=rules.name, parts=rules.parts)
    pool.put(item_of("7", "exact"))
    score = collect(pool, 1)[0]
    assert score.details == {"over_limit": 1.0, "correct": 0.0, "brief": 0.0, "slow": -2.0}
    assert score.reward == -2.0
    never = rules_of("remote", reward={})
    assert undecided(item_of("7", "remote"), never, "no answer").reward is None
