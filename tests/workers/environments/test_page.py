"""The example in docs/environments.md is short and works."""

import re
from pathlib import Path

from april.workers.environments import ENVIRONMENTS
from april.workers.environments.process import NO_STATE, EnvironmentCall, answer_call
from april.workers.rewards.messages import Item, RewardRules
from april.workers.rewards.process import verify

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def test_the_page_s_custom_environment_works(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) < 20
    (name,) = re.findall(r'environment\.name = "([^"]+)"', code)
    (tmp_path / "my_environments.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    ENVIRONMENTS.find(name)
    state, answers = b"", []
    for number, guess in enumerate(["is it 3?", "7", "so 5"]):
        answer = answer_call(name, EnvironmentCall(0, guess, number, True, state, "", "5"))
        assert not answer.error
        state, answers = answer.state, [*answers, (answer.text, answer.done)]
    assert answers == [("more", False), ("less", False), ("yes", True)]
    [score] = verify([Item(0, "environment", "", "5", "stop", "", 0, state)], RewardRules())
    assert score.reward == 0.8


def test_the_environment_s_state_gives_the_reward_and_a_response_without_a_call_gets_zero():
    def score(state):
        return verify([Item(0, "environment", "", "", "stop", "", 0, state)], RewardRules())[0]

    assert (score(b"").reward, score(b"").error) == (0.0, None)
    assert score(b"\x82\xa6reward\x01\xa4hits\x03").details == {"over_limit": 0.0, "hits": 3.0}
    assert "has no 'reward'" in score(b"\x80").error
    assert "has no 'reward'" in score(NO_STATE).error and score(NO_STATE).reward is None
