"""The verifier `gsm8k`: the number after the last `####` of a response."""

from decimal import Decimal

from april.data.gsm8k import final_number, last_number, leading_number
from april.workers.rewards.answers import after_thinking


def gsm8k(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, float]]:
    """1.0 iff the number after the last `####` equals the label. Raises ValueError for a label that is not a number.

    Published code has two rules: *strict*, the number after `####`, and *flexible*, the last number anywhere (`method`
    of verl's reward_score/gsm8k.py; `strict-match` and `flexible-extract` of lm-evaluation-harness's task gsm8k). This
    verifier rewards the strict one, as verl does by default: the prompt asks for the mark, and a last number can be
    right by accident. The flexible result is a detail; its difference from the reward shows how much is lost to the
    format alone. The dataset's own code (openai/grade-school-math, dataset.py) takes the first mark; here, as in verl,
    the last one counts, since `####` also begins a heading in Markdown. Numbers are compared by value: 18.00 is 18.
    """
    wanted = leading_number(label)
    if wanted is None:
        raise ValueError(f"label {label[:80]!r} is not a number")
    text = after_thinking(response)
    strict, flexible = final_number(text), last_number(text)
    details = {"marked": float(strict is not None), "flexible": float(equal(flexible, wanted))}
    return float(equal(strict, wanted)), details


def equal(answer: str | None, wanted: str) -> bool:
    return answer is not None and Decimal(answer) == Decimal(wanted)


vars(gsm8k)["example"] = "#### {}".format
