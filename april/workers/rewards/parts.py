"""A reward of several parts, `[reward.part.NAME]`: which verifiers a response is scored by, and how their numbers make
its reward.

A part is the reward of a verifier of its own, a detail that the run's verifier gives, that verifier's reward, or a
penalty. The score has each part's value as a detail under its name; it is 0 if the part that gates it is too low.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

from msgspec.structs import replace

from april.wire.limits import OWN_REWARD, PENALTIES
from april.workers.rewards.messages import Item, RewardPart, RewardRules, Score
from april.workers.rewards.verifiers import in_batches

Details = Mapping[str, float]


def parts_of(verifier: str, rules: RewardRules) -> dict[str, RewardPart]:
    """The configured parts of which a response's reward is composed, by name. `verifier`: the response's own. If it is
    not the run's (`reward.name`), the result is empty, and this verifier's reward alone counts."""
    return rules.parts if verifier == rules.name else {}


def asked_verifiers(verifier: str, rules: RewardRules) -> dict[str, str]:
    """The verifiers to call for a response: name of a part of its reward -> name of the part's verifier. The key ""
    stands for the response's own verifier, which is left out if no part needs it."""
    parts = parts_of(verifier, rules)
    is_asked = not parts or any(not part.verifier and name not in PENALTIES for name, part in parts.items())
    own = {"": verifier} if is_asked else {}
    return own | {name: part.verifier for name, part in parts.items() if part.verifier}


def scored_in_batches(verifier: str, rules: RewardRules) -> bool:
    """Whether each verifier that is called for a response takes many responses in one call; scoring many then takes
    hardly longer than scoring one."""
    return all(map(in_batches, asked_verifiers(verifier, rules).values()))


def joined(columns: Mapping[str, Sequence[Score]], items: Sequence[Item]) -> list[Score]:
    """One score for each item: the score by its own verifier, with the rewards of the parts' verifiers as details. If
    one of these scores is an error, the item's score is that error. `columns`: for each key of `asked_verifiers`, the
    scores of all items."""
    own = columns.get("") or [Score(item.key, 0.0) for item in items]
    given = {name: scores for name, scores in columns.items() if name}
    return [
        reduce(with_part, ((name, scores[index]) for name, scores in given.items()), score)
        for index, score in enumerate(own)
    ]


def with_part(score: Score, part: tuple[str, Score]) -> Score:
    """`score`, with the reward that a part's verifier gave as a further detail; details that `score` already has are
    not replaced. If one of the two scores is an error, that error. `part`: (name of the part, score by its
    verifier)."""
    name, given = part
    if score.reward is None or given.reward is None:
        return given if given.reward is None else score
    details = {**given.details, **score.details, name: given.reward}
    feedback = "\n".join(filter(None, (score.feedback, given.feedback)))
    return replace(score, details=details, token_scores={**given.token_scores, **score.token_scores}, feedback=feedback)


def combined(
    reward: float, details: Details, penalties: Details, parts: Mapping[str, RewardPart]
) -> tuple[float, dict[str, float]]:
    """The reward of a response as the weighted sum of its parts, and its details with the value of each part.

    `reward`, `details`: those that the verifiers gave. `penalties`: numbers, at most 0, by name; one that is not a part
    is added with weight 1. If there is a penalty, the detail `base` is the reward without penalties. Raises LookupError
    for a part that no verifier gave.
    """
    given = dict.fromkeys(PENALTIES, 0.0) | {OWN_REWARD: reward} | dict(details) | dict(penalties)
    if missing := next((name for name in parts if name not in given), None):
        raise LookupError(f"gave no detail {missing!r}, which is a part of the reward")
    values = {
        name: float(given[name]) if not part.gate or given[part.gate] > part.gate_above else 0.0
        for name, part in parts.items()
    }
    base = sum(part.weight * values[name] for name, part in parts.items() if name not in PENALTIES)
    lost = sum(parts[name].weight * values[name] if name in parts else value for name, value in penalties.items())
    shown = {**details, **penalties, **values}
    return base + lost, shown | ({"base": base} if penalties else {})
