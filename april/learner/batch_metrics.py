"""Figures of a delivered batch, whatever trains it: rewards, tokens, groups, and the policy versions of its tokens."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from april.data.groups import has_spread
from april.learner.batch import TrainSample, group_forks
from april.learner.credit import sampled_token_count
from april.learner.diagnostics import is_repetitive
from april.learner.turns import turn_metrics

MAX_VERSIONS = 64
"""Number of the newest policy versions that get a metric `version_share_STEP` each; it bounds the number of metrics of
a step."""
BY_SOURCE = ("reward", "samples", "tokens", "groups", "zero_spread_groups", "gradient_groups")
"""Names of the metrics that a run with several sources also reports for each source."""


def batch_metrics(
    groups: Sequence[list[TrainSample]], with_gradient: Collection[int], turn_reward: str = ""
) -> dict[str, float]:
    """Metrics of a batch by name: rewards, tokens, groups, and the versions of its tokens. `with_gradient`: indices in
    the batch of the groups that have a row with a gradient. `turn_reward`: name of the token score that is the reward
    of turns; "" for none."""
    samples = [sample for group in groups for sample in group]
    forks = [group_forks(group) for group in groups]
    rewards = [[rows[0].reward for rows in group] for group in forks]
    of_samples = [reward for group in rewards for reward in group]
    return {
        **turn_metrics(samples, turn_reward),
        "reward": float(np.mean(of_samples)) if of_samples else 0.0,
        "samples": float(len(of_samples)),
        "tokens": float(sum(sampled_token_count(group) for group in groups)),
        "groups": float(len(groups)),
        "zero_spread_groups": float(sum(not has_spread(group) for group in rewards)),
        "looping_share": sum(is_repetitive(s.tokens[s.prompt_tokens :]) for s in samples) / max(1, len(samples)),
        "gradient_groups": float(len(with_gradient)),
        **version_shares(samples),
        **hinted_share(samples),
    }


def metrics_by_source(
    groups: Sequence[list[TrainSample]], with_gradient: Collection[int], turn_rewards: Sequence[str]
) -> dict[str, float]:
    """For each source of which the batch has groups: the metrics `BY_SOURCE` and those of turns, named NAME_source_S
    for source number S. `with_gradient` as for `batch_metrics`. `turn_rewards`: for each source the name of the token
    score that is the reward of turns; "" for none."""
    found = dict[str, float]()
    for source, turn_reward in enumerate(turn_rewards):
        numbers = [number for number, group in enumerate(groups) if group and group[0].source == source]
        if numbers:
            own = [groups[number] for number in numbers]
            figures = batch_metrics(own, {*numbers} & {*with_gradient}, turn_reward)
            names = *BY_SOURCE, *(name for name in figures if name.startswith("turn_"))
            found |= {f"{name}_source_{source}": figures[name] for name in names}
    return found


def hinted_share(samples: Sequence[TrainSample]) -> dict[str, float]:
    """The metric `hinted_share`, by name: the share of the samples whose prompt also exists with a hint, 0 to 1. {} if
    no sample has such a prompt."""
    hinted = sum(len(sample.hinted_prompt) > 0 for sample in samples)
    return {"hinted_share": hinted / len(samples)} if hinted else {}


def version_shares(samples: list[TrainSample]) -> dict[str, float]:
    """Share of the batch's sampled tokens by policy version, as `version_share_STEP`; 0 to 1.

    Versions older than the newest MAX_VERSIONS are summed in `version_share_older`.
    """
    tokens: Counter[int] = Counter()
    for sample in samples:
        for start, end, version in sample.segments:
            tokens[version.step] += end - start
    shares: defaultdict[str, float] = defaultdict(float)
    for index, step in enumerate(sorted(tokens, reverse=True)):
        shares[f"version_share_{step if index < MAX_VERSIONS else 'older'}"] += tokens[step] / tokens.total()
    return dict(shares)
