"""Parts of a reward that nothing gives, gates that are none, and advantages without parts are refused."""

import pytest

from april.config import Config, ConfigError
from april.config.checks import check


def made(**sections):
    tree = {"model": {"path": "."}, "data": {"path": "rows.jsonl"}}
    return Config.model_validate(tree | sections)


def parts(**tables):
    return {"part": tables}


GDPO = {"algorithm": {"advantage": "gdpo"}}
REFUSED = {
    "'reward.part' = 'over_limit' is no name": {"reward": parts(over_limit={})},
    "'reward.part' = 'a b' is no name": {"reward": parts(**{"a b": {}})},
    "'reward.part.brief.verifier' = 'nobody' is no verifier": {"reward": parts(brief={"verifier": "nobody"})},
    "'reward.part.brief.verifier' = 'group:mine:f' sees a whole group": {
        "reward": parts(brief={"verifier": "group:mine:f"}),
    },
    "'reward.part.reward.verifier' = 'exact' is given to 'reward'": {"reward": parts(reward={"verifier": "exact"})},
    "'reward.part' = 'overlong' is a penalty that is off": {"reward": parts(overlong={})},
    r"'reward.part.brief.weight' = 1e\+300 is not within 1e\+09": {"reward": parts(brief={"weight": 1e300})},
    r"'reward.without_special_tokens' = \['exact'\] names one of reward.name = 'final_answer' and": {
        "reward": parts(brief={"verifier": "exact"}) | {"without_special_tokens": ["exact"]},
    },
    "'reward.part.brief.gate' = 'right' is no other part": {"reward": parts(brief={"gate": "right"})},
    "'reward.part.brief.gate' = 'brief' is no other part": {"reward": parts(brief={"gate": "brief"})},
    "'algorithm.advantage' = 'gdpo' is made of the parts": GDPO,
    "'reward.overlong_buffer_tokens' = 8 is a penalty that algorithm.advantage = 'gdpo' does not see": {
        "reward": parts(reward={}) | {"overlong_buffer_tokens": 8}, **GDPO,
    },
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused(why):
    with pytest.raises(ConfigError, match=why):
        check(made(**REFUSED[why]), inputs=())


def test_what_fits_is_not_refused_and_names_the_verifiers_that_are_asked():
    reward = {"name": "math", "overlong_buffer_tokens": 8}
    reward |= parts(correct={}, overlong={}, brief={"verifier": "mine:f", "gate": "correct", "gate_above": 0.5})
    config = made(reward=reward, **GDPO)
    check(config, inputs=())
    assert config.reward.asked("math") == ["math", "mine:f"]
    assert config.reward.asked("exact") == ["exact"], "a row that names its own verifier has no parts"
