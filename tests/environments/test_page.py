"""The page's own environment is as short as it says, and does what it says."""

import re
from pathlib import Path

from april.environments import ENVIRONMENTS
from april.environments.messages import NO_STATE, Call
from april.environments.process import ask
from april.workers.rewards.messages import Item, RewardRules
from april.workers.rewards.process import verify

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def test_the_example_of_an_environment_of_ones_own_works(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) < 20
    (name,) = re.findall(r'environment\.name = "([^"]+)"', code)
    (tmp_path / "my_environments.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    ENVIRONMENTS.find(name)
    state, said = b"", []
    for number, guess in enumerate(["is it 3?", "7", "so 5"]):
        answer = ask(name, Call(0, guess, number, True, state, "", "5"))
        assert not answer.error
        state, said = answer.state, [*said, (answer.text, answer.done)]
    assert said == [("more", False), ("less", False), ("yes", True)]
    [score] = verify([Item(0, "environment", "", "5", "stop", "", 0, state)], RewardRules())
    assert score.reward == 0.8


def test_what_the_environment_says_is_the_reward_and_a_response_without_it_is_worth_nothing():
    def worth(state):
        return verify([Item(0, "environment", "", "", "stop", "", 0, state)], RewardRules())[0]

    assert (worth(b"").reward, worth(b"").error) == (0.0, None)
    assert worth(b"\x82\xa6reward\x01\xa4hits\x03").details == {"over_limit": 0.0, "hits": 3.0}
    assert "has no 'reward'" in worth(b"\x80").error
    assert "has no 'reward'" in worth(NO_STATE).error and worth(NO_STATE).reward is None
