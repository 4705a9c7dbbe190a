"""An environment that cannot be called is refused before anything starts."""

import pytest

from april import config as configuration
from april.config import ConfigError
from april.data.tokenizer import Tokenizer
from april.launch.preflight import examine
from april.workers.environments.turns import turn_end_ids


def test_a_turn_ends_with_one_token(in_turns, babbling_policy):
    tokenizer = Tokenizer(babbling_policy)
    assert turn_end_ids(["=", "#", "="], tokenizer) == set(tokenizer.encode_prompt("=#").tolist())
    with pytest.raises(ConfigError, match=r"environment.turn_ends"):
        turn_end_ids(["=", "12"], tokenizer)
    with pytest.raises(ConfigError, match="turn_ends"):
        examine(configuration.load(in_turns, ["--environment.turn_ends", '["ab"]']), [], 0).refuse()
