"""The verifier `environment`: a response is worth what its environment says."""

import msgspec

from april.workers.rewards.messages import Item, RewardRules, Score, takes_items


@takes_items
def environment(items: list[Item], rules: RewardRules) -> list[Score]:
    """`reward` of the last state, its other numbers are details; 0 for a response that its environment was never asked
    about, since the policy has not come to the end of a turn.

    Raises LookupError where the environment has answered, and its last state has no reward.
    """
    return [worth_of(item) for item in items]


vars(environment)["reads_state"] = True


def worth_of(item: Item) -> Score:
    if not item.state:
        return Score(item.key, 0.0)
    state = msgspec.msgpack.decode(item.state)
    if not isinstance(state, dict) or "reward" not in state:
        raise LookupError(
            "the environment's last state has no 'reward'; return one as Observation(text, {'reward': ...})"
        )
    details = {key: value for key, value in state.items() if key != "reward" and isinstance(value, int | float)}
    return Score(item.key, state["reward"], None, details)
