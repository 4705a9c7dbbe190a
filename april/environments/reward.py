"""The verifier `environment`: a response is worth what its environment says."""

from typing import Any


def environment(response: str, label: str, finish_reason: str, state: Any) -> tuple[float, dict[str, float]]:
    """`reward` of the last state, its other numbers are details; 0 for a response that no observation is in.

    Raises LookupError for a state without it.
    """
    if state is None:
        return 0.0, {}
    if not isinstance(state, dict) or "reward" not in state:
        raise LookupError(
            "the environment's last state has no 'reward'; return one as Observation(text, {'reward': ...})"
        )
    details = {key: value for key, value in state.items() if key != "reward" and isinstance(value, int | float)}
    return state["reward"], details
