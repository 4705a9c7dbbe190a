"""Feedback of verifiers: what is one, how it is bounded, and how it leaves a worker."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april import config as configuration
from april import wire
from april.util.text import cut_in_middle
from april.wire.limits import FROM_PEER, MAX_FEEDBACK_CHARACTERS
from april.workers.reports import Reports
from april.workers.rewards.code import NO_PROGRAM, code
from april.workers.rewards.messages import GroupScore, Item, RewardPart, RewardRules, Score
from april.workers.rewards.process import verify
from april.workers.rewards.remote import score_of
from april.workers.scoring import closing, reward_rules, token_values

MODULE = """
FEEDBACK = {"text": "line 3: error", "none": None, "number": 0.5, "list": ["a"], "long": "a" * 50 + "b" * 50,
            "raw": "a\\x00\\ud800\\x1b[31m\\n\\tb", "empty": ""}

def own(response, label, finish_reason):
    return 1.0, {"x": 2.0, "feedback": FEEDBACK[label]}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.0, "feedback": "theirs"}

def all_of_them(responses, label, finish_reasons):
    return [(0.0, {"feedback": str(index)}) for index, _ in enumerate(responses)]
"""
SHOWN = RewardRules(feedback=21)


@pytest.fixture(autouse=True)
def own_verifiers(tmp_path, monkeypatch):
    (tmp_path / "told_verifiers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def scored(label, rules=SHOWN, name="told_verifiers:own", response=""):
    [score] = verify([Item(0, name, response, label, "stop")], rules)
    return score


def test_a_text_named_feedback_is_kept_where_it_is_shown_and_is_no_detail():
    assert [scored(label).feedback for label in ("text", "none", "empty", "number")] == ["line 3: error", "", "", ""]
    assert scored("number").details["feedback"] == 0.5, "a number of that name stays a detail"
    assert scored("long").feedback == "a" * 10 + "…" + "b" * 10
    assert scored("raw").feedback == "a   [31m\n\tb"
    assert "feedback ['a'], which is no text; give text" in scored("list").error
    hidden = scored("text", RewardRules())
    assert (hidden.reward, hidden.feedback) == (1.0, "") and "feedback" not in hidden.details


def test_feedback_of_other_interfaces_and_of_parts_is_kept():
    assert scored("2", name="verl:told_verifiers:compute_score").feedback == "theirs"
    assert score_of(Item(0, "remote", "", "", "stop"), {"score": 1, "feedback": "kind"}).feedback == "kind"
    parts = {"other": RewardPart("verl:told_verifiers:compute_score"), "x": RewardPart()}
    rules = RewardRules(feedback=99, name="told_verifiers:own", parts=parts)
    assert scored("text", rules).feedback == "line 3: error\ntheirs"
    scores = verify([Item(0, "group:told_verifiers:all_of_them", "", "", "stop")] * 2, SHOWN)
    assert [score.feedback for score in scores] == ["0", "1"]


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 40))
def test_a_long_text_keeps_both_ends_and_any_text_is_fit_for_a_message(text, most):
    found = cut_in_middle(text, most)
    assert len(found) == min(len(text), most) and len(found.encode()) <= 4 * most
    assert all(each.isprintable() or each in "\n\t" for each in found)
    begin, end = len(found) // 2, max(0, len(found) - 1) // 2
    kept = [*zip(found[:begin], text, strict=False), *zip(found[::-1][:end], text[::-1], strict=False)]
    assert all(each == own or (each == " " and not own.isprintable()) for each, own in kept)


def test_the_key_and_the_hint_say_how_much_is_kept(config_file):
    hint = ["--algorithm.divergence", "forward_kl", "--algorithm.hint", "{prompt} {feedback}"]
    shown = configuration.load(config_file, [*hint, "--reward.feedback_characters", "7"])
    assert (reward_rules(shown).feedback, reward_rules(configuration.load(config_file, [])).feedback) == (7, 0)
    for number in ("0", "32769"):
        with pytest.raises(configuration.ConfigError, match=r"reward\.feedback_characters"):
            configuration.load(config_file, ["--reward.feedback_characters", number])


def test_closings_with_feedback_fit_into_reports_whatever_their_size(monkeypatch):
    longest = "€" * MAX_FEEDBACK_CHARACTERS
    one = closing(Score(1, 1.0, feedback=longest))
    group = closing(GroupScore(2, [Score(index, 0.0, feedback=longest[:2000]) for index in range(64)]))
    assert one.feedback == [longest] and {len(text) for text in group.feedback} == {MAX_FEEDBACK_CHARACTERS // 64}
    assert type(closing(Score(3, 1.0))) is wire.Scored
    mixed = Score(4, 1.0, token_scores={"a": np.ones(2, np.float32).tobytes()}, feedback="b")
    reports, sent = Reports(None), []
    reports.connection = type("Connection", (), {"is_silent": False, "send": lambda self, *sends: sent.append(sends)})()
    for each in (one, group, closing(Score(3, 1.0)), closing(Score(5, 1.0, feedback="c"))):
        reports.close(each)
    reports.close(closing(mixed), token_values(mixed))
    reports.send()
    assert [[each.lease_id for each in message.closings] for message, _ in sent] == [[3], [1], [2], [5, 4]]
    for message, arrays in sent:
        assert wire.decode([bytes(part) for part in wire.encode(message, arrays)], FROM_PEER).message == message


def failing(label, program, name="code"):
    [score] = code([Item(0, name, f"```python\n{program}\n```" if program else "?", label, "stop")], SHOWN)
    return score.reward, score.feedback


def test_code_says_which_test_fails_and_how():
    stream = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]})
    assert failing(stream, "print(input())") == (1.0, "")
    assert failing(stream, "print(1)") == (0.0, "Input:\n2\n\nExpected:\n2\n\nFound:\n1")
    assert failing(stream, "") == (0.0, NO_PROGRAM)
    call = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    assert failing(call, "def add(a, b): return a - b")[1] == "add, called with [1, 2]\nExpected:\n3\nFound:\n-1"
    assert failing(call, "def add(a, b): return a /")[1].endswith("SyntaxError: invalid syntax")
    tests = "assert add(1, 2) == 3\nassert add(2, 2) == 4, 'two and two'"
    assert failing(tests, "def add(a, b): return 3") == (
        0.0,
        "assert add(2, 2) == 4, 'two and two'\nAssertionError: two and two",
    )
    assert "ZeroDivisionError" in failing(tests, "1 / 0")[1]
