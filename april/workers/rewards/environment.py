"""The verifier `environment`: the environment itself gives the reward."""

import msgspec

from april.workers.rewards.messages import Item, RewardRules, Score, takes_items


@takes_items
def environment(items: list[Item], rules: RewardRules) -> list[Score]:
    """The `reward` in the environment's final state; its other numbers are details.

    The reward is 0 if the environment was never called, because the policy never ended a turn. Raises LookupError if
    the environment was called and its final state has no reward.
    """
    return [score_of_state(item) for item in items]


vars(environment)["reads_state"] = True


def score_of_state(item: Item) -> Score:
    if not item.state:
        return Score(item.key, 0.0)
    state = msgspec.msgpack.decode(item.state)
    if not isinstance(state, dict) or "reward" not in state:
        raise LookupError(
            "the environment's last state has no 'reward'; return one as Observation(text, {'reward': ...})"
        )
    details = {key: value for key, value in state.items() if key != "reward" and isinstance(value, int | float)}
    return Score(item.key, state["reward"], None, details)
