"""mean@k and pass@k of held-out prompts with k samples each, with confidence intervals over prompts."""

from math import comb, sqrt
from statistics import fmean, stdev
from typing import Any

from april.broker.ledger.samples import Group, GroupState, Sample, SampleState
from april.config.evaluation import HELD_OUT
from april.config.stored import held_out_score
from april.wire.message import Version

PASSED = 1.0
"""Least reward of a sample that counts as having solved its prompt."""
Z95 = 1.959964
"""Half width of the central 95 % of a normal distribution, in standard deviations."""


def summarise(rewards: list[list[float]], samples: int) -> dict[str, Any]:
    """Compute mean@k and pass@k with 95 % intervals over prompts, which are the independent draws.

    `rewards`: for each prompt with finished samples, their rewards; `samples`: k, the samples requested per prompt.
    Returns {"mean_at_k": {"k", "value", "low", "high"}, "pass_at_k": {"1": {"value", "low", "high", "prompts"}, "2":
    ..., "k": ...}}; an entry is None if no prompt has enough samples for it.
    """
    passes = {}
    for k in sizes(samples):
        shares = [
            pass_at(k, len(prompt), sum(reward >= PASSED for reward in prompt))
            for prompt in rewards
            if len(prompt) >= k
        ]
        score = describe(shares)
        passes[str(k)] = score and {**score, "prompts": len(shares)}
    mean = describe([fmean(prompt) for prompt in rewards])
    return {"mean_at_k": mean and {"k": samples, **mean}, "pass_at_k": passes}


def describe_set(groups: list[Group], samples: int, version: Version | None) -> dict[str, Any]:
    """Scores of a set of held-out prompts with `samples` samples each, evaluated on `version`; None: no token of them
    was sampled.

    `reward` is the mean over prompts of the mean reward of their samples, before penalties. `accuracy` is the same of
    the detail `correct`, or None unless that is known of each sample. mean@k and pass@k are of `correct`, or else of
    the reward. Failed samples are counted, not scored as zero. So are prompts that were not evaluated, which could not
    be generated under `version` in time.
    """
    done = [samples_done for group in groups if (samples_done := evaluated_samples(group, version))]
    failed = [group for group in groups if not group.live_samples]
    scores = summarise([[sample.accuracy for sample in prompt] for prompt in done], samples)
    is_known = all(sample.is_correct_known for prompt in done for sample in prompt)
    reward = describe([fmean(sample.base_reward for sample in prompt) for prompt in done])
    return {
        "accuracy": scores["mean_at_k"]["value"] if is_known and done else None,
        "reward": reward and reward["value"],
        "prompts": len(done),
        "failed": len(failed),
        "failed_samples": sum(len(group.samples) - len(group.live_samples) for group in groups),
        "not_evaluated": len(groups) - len(done) - len(failed),
        **scores,
    }


def versions_of(groups: list[Group], version: Version | None) -> set[Version]:
    """Versions that sampled any token of the samples that count in an evaluation on `version`; None: none counts."""
    return {of for group in groups for sample in evaluated_samples(group, version) for of in versions_in(sample)}


def evaluated_samples(group: Group, version: Version | None) -> list[Sample]:
    """The scored samples of a held-out prompt whose tokens were all sampled under `version`; [] for a discarded group,
    some of whose samples were not evaluated."""
    if group.state is GroupState.DISCARDED:
        return []
    return [s for s in group.samples if s.state is SampleState.DONE and versions_in(s) == {version}]


def versions_in(sample: Sample) -> set[Version]:
    return {version for fork in sample.with_forks for _, _, version in fork.segments}


def score_of(result: dict[str, Any], name: str) -> float | None:
    """The accuracy of an evaluation on the set `name`, or the reward if the accuracy is not known; None if the set was
    not evaluated, or none of its samples could be scored. `result`: what `Recorder.record_evaluation` returned."""
    return held_out_score(sets_of(result).get(name, {}))[1]


def is_complete(result: dict[str, Any], name: str) -> bool:
    """Whether every prompt of the evaluation set `name` was evaluated; prompts that failed count as evaluated.
    `result`: what `Recorder.record_evaluation` returned."""
    return not sets_of(result).get(name, {}).get("not_evaluated", 0)


def sets_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores of each evaluation set, by its name, from the `result` that `Recorder.record_evaluation` returned."""
    return result.get("sets") or {HELD_OUT: result}


def describe_evaluation(result: dict[str, Any]) -> str:
    """Describe an evaluation in one sentence for the log, with the number of prompts that could not be scored."""
    sets = sets_of(result)
    scores = [f"{f'{name} ' if len(sets) > 1 else ''}{score(scored)}" for name, scored in sets.items()]
    return f"evaluation at step {result['step']}: {'; '.join(scores)}"


def score(scored: dict[str, Any]) -> str:
    failed = f", {scored['failed']} left out, whose responses could not be scored" if scored["failed"] else ""
    failed += f", {scored['not_evaluated']} not evaluated in time" if scored.get("not_evaluated") else ""
    measure, value = held_out_score(scored)
    return f"{measure} {'none' if value is None else f'{value:.3f}'} on {scored['prompts']} prompts{failed}"


def sizes(samples: int) -> list[int]:
    """Values of k for pass@k: the powers of two below `samples`, and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} & set(range(1, samples + 1)) | {samples})


def pass_at(k: int, samples: int, passed: int) -> float:
    """Pass@k of one prompt: the probability that at least one of k samples, drawn without replacement, has passed.

    The unbiased estimator of "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1.
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def describe(scores: list[float]) -> dict[str, float] | None:
    """Mean of the prompts' scores with its 95 % interval, as value, low and high; None without scores."""
    if not scores:
        return None
    mean = fmean(scores)
    low, high = wilson(mean, len(scores)) if min(scores) >= 0 and max(scores) <= 1 else normal(mean, scores)
    return {"value": round(mean, 6), "low": round(low, 6), "high": round(high, 6)}


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Wilson's score interval (1927) at 95 % for the mean of `count` values from 0 to 1: (lower, upper) bound.

    Derived for values that are 0 or 1. It is wide for other values, as none vary more at the same mean. Unlike the
    normal interval it does not shrink to a point when all values agree.
    """
    square = Z95**2
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def normal(mean: float, scores: list[float]) -> tuple[float, float]:
    """95 % interval of the mean by the normal approximation; infinite for a single score."""
    half = Z95 * stdev(scores) / sqrt(len(scores)) if len(scores) > 1 else float("inf")
    return mean - half, mean + half
