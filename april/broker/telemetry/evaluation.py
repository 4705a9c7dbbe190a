"""mean@k and pass@k of held-out prompts with k samples each, with intervals for how many prompts were asked."""

from math import comb, sqrt
from statistics import fmean, stdev
from typing import Any

from april.broker.ledger.samples import Group, Sample, SampleState
from april.config.evaluation import HELD_OUT
from april.wire.version import Version

PASSED = 1.0
"""a sample with at least this reward has solved its prompt"""
Z95 = 1.959964
"""a normal value lies within so many standard deviations with probability 95 %"""


def summarise(rewards: list[list[float]], samples: int) -> dict[str, Any]:
    """`rewards`: of the finished samples of each prompt that has any; `samples`: k, those that were asked for.

    {"mean_at_k": {"k", "value", "low", "high"}, "pass_at_k": {"1": {"value", "low", "high", "prompts"}, "2": ..., "k":
    ...}}: 95 % intervals over prompts, which are the independent draws. None for what no prompt has enough samples of.
    """
    passes = {}
    for k in sizes(samples):
        shares = [pass_at(k, len(one), sum(reward >= PASSED for reward in one)) for one in rewards if len(one) >= k]
        score = describe(shares)
        passes[str(k)] = score and {**score, "prompts": len(shares)}
    mean = describe([fmean(one) for one in rewards])
    return {"mean_at_k": mean and {"k": samples, **mean}, "pass_at_k": passes}


def describe_set(groups: list[Group], samples: int) -> dict[str, Any]:
    """Of held-out prompts that were asked `samples` times; failed samples are counted, not scored as zero. `accuracy`
    is the mean over prompts of that of their samples."""
    done = [found for group in groups if (found := done_of(group))]
    scores = summarise([[sample.accuracy for sample in of_prompt] for of_prompt in done], samples)
    return {
        "accuracy": scores["mean_at_k"] and scores["mean_at_k"]["value"],
        "prompts": len(done),
        "failed": len(groups) - len(done),
        "failed_samples": len(groups) * samples - sum(map(len, done)),
        **scores,
    }


def versions_of(groups: list[Group]) -> set[Version]:
    """That have sampled any of it."""
    lines = [line for group in groups for sample in done_of(group) for line in sample.lines]
    return {version for line in lines for _, _, version in line.segments}


def done_of(group: Group) -> list[Sample]:
    return [sample for sample in group.samples if sample.state is SampleState.DONE]


def accuracy_of(result: dict[str, Any], name: str) -> float | None:
    """On the set of that name; None where it was not asked, or nothing could be scored."""
    return sets_of(result).get(name, {}).get("accuracy")


def sets_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was found, by the names of the sets."""
    return result.get("sets") or {HELD_OUT: result}


def describe_evaluation(result: dict[str, Any]) -> str:
    """In one sentence, with the prompts that it had to leave out."""
    sets = sets_of(result)
    said = [f"{f'{name} ' if len(sets) > 1 else ''}{score(found)}" for name, found in sets.items()]
    return f"evaluation at step {result['step']}: accuracy {'; '.join(said)}"


def score(found: dict[str, Any]) -> str:
    left_out = f", {found['failed']} left out, whose responses could not be scored" if found["failed"] else ""
    accuracy = "none" if found["accuracy"] is None else f"{found['accuracy']:.3f}"
    return f"{accuracy} on {found['prompts']} prompts{left_out}"


def sizes(samples: int) -> list[int]:
    """Powers of two below `samples`, and `samples`."""
    return sorted({2**power for power in range(samples.bit_length())} & set(range(1, samples + 1)) | {samples})


def pass_at(k: int, samples: int, passed: int) -> float:
    """Probability that of k samples, drawn from these without putting back, at least one has passed.

    The unbiased estimator of "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1.
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def describe(scores: list[float]) -> dict[str, float] | None:
    """Mean of the prompts' scores with its 95 % interval."""
    if not scores:
        return None
    mean = fmean(scores)
    low, high = wilson(mean, len(scores)) if min(scores) >= 0 and max(scores) <= 1 else normal(mean, scores)
    return {"value": round(mean, 6), "low": round(low, 6), "high": round(high, 6)}


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Wilson's score interval (1927) for the mean of `count` values from 0 to 1.

    Exact in intent for values that are 0 or 1, wide for others: none vary more with the same mean. Unlike the normal
    interval it does not shrink to a point when all values agree.
    """
    square = Z95**2
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def normal(mean: float, scores: list[float]) -> tuple[float, float]:
    half = Z95 * stdev(scores) / sqrt(len(scores)) if len(scores) > 1 else float("inf")
    return mean - half, mean + half
