"""Reward shaping added to every verifier's reward: the overlong penalty and the format penalty."""

import re

from april.workers.rewards.messages import Item, RewardRules


def shape(reward: float, details: dict[str, float], item: Item, rules: RewardRules) -> tuple[float, dict[str, float]]:
    """The shaped reward and its details; if a penalty is configured, they include `base`, the verifier's own reward."""
    penalties = {}
    if rules.overlong_buffer_tokens:
        penalties["overlong"] = overlong(item.tokens, rules)
    if rules.format_pattern:
        matches = re.search(rules.format_pattern, item.response, re.DOTALL) is not None
        penalties["format"] = 0.0 if matches else -rules.format_penalty
    if not penalties:
        return reward, details
    return reward + sum(penalties.values()), {**details, "base": reward, **penalties}


def overlong(tokens: int, rules: RewardRules) -> float:
    """Overlong penalty: 0 before the buffer at the end of the budget, then linear to -`overlong_penalty` at the budget
    (soft overlong punishment, arXiv 2503.14476, equation 13)."""
    beyond = tokens - (rules.max_response_tokens - rules.overlong_buffer_tokens)
    return -rules.overlong_penalty * min(1.0, max(0.0, beyond / rules.overlong_buffer_tokens))
