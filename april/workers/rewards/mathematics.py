"""Verifiers of mathematical answers: `math` by meaning, `deepscaler` and `dapo` by the rules of these works.

Equality of meaning is the `math-verify` library's: fractions, units, sets, intervals, equations, matrices. Its own
time limits use the alarm signal of the process, and its errors count as "not equal"; both are turned off, since a
verifier's process has a time limit that kills, and an error is no reward.
"""

import logging
import re
from functools import lru_cache

from april.workers.rewards.answers import END_OF_THINKING, after_phrase, after_thinking, last_boxed

logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_CHARACTERS = 2000
"""a longer answer is no answer, but would keep a parser busy"""
TAIL_CHARACTERS = 300
"""DAPO looks for the answer in the end of a response only"""
RESPONSE_MARK = "###Response"

Detailed = tuple[float, dict[str, float]]


def math(response: str, label: str, finish_reason: str) -> Detailed:
    """1.0 iff the answer means what the label does. The answer: the last box behind the reasoning, or else what the
    library finds there, such as a formula after "the answer is"."""
    text = after_thinking(response)
    answer = last_boxed(text)
    correct = same_meaning(label, text if answer is None else boxed(answer))
    return float(correct), {"boxed": float(answer is not None)}


def deepscaler(response: str, label: str, finish_reason: str) -> Detailed:
    """1.0 iff the reasoning is closed by `</think>` (or `###Response`) and the last box behind it means the label."""
    mark = END_OF_THINKING if END_OF_THINKING in response else RESPONSE_MARK
    _, found, text = response.rpartition(mark)
    answer = last_boxed(text) if found else None
    details = {"closed": float(bool(found)), "boxed": float(answer is not None)}
    return float(answer is not None and same_meaning(label, boxed(answer))), details


def dapo(response: str, label: str, finish_reason: str) -> Detailed:
    """+1.0 iff the text behind the last "Answer:" in the end of the response is the label once both are normalised,
    otherwise -1.0 (arXiv 2503.14476, section 2.4)."""
    answer = after_phrase(response[-TAIL_CHARACTERS:], "answer")
    correct = answer is not None and normalise(answer) == normalise(last_boxed(label) or label)
    return (1.0 if correct else -1.0), {"correct": float(correct), "answered": float(answer is not None)}


# --- meaning ------------------------------------------------------------------------------------------------


for verifier in (math, deepscaler):
    vars(verifier)["needs"] = "math_verify"  # of the `rewards` extra, imported when it is first used


def same_meaning(label: str, text: str) -> bool:
    """Whether the answer in `text` means the label. Raises ValueError for a label that says nothing."""
    from math_verify import parse, verify

    gold = parsed_label(label)
    answers = parse(text[-ANSWER_CHARACTERS:], parsing_timeout=None, raise_on_error=True)
    return bool(answers) and verify(list(gold), answers, timeout_seconds=None, raise_on_error=True)


@lru_cache(maxsize=10_000)
def parsed_label(label: str) -> tuple:
    from math_verify import parse

    text = label if last_boxed(label) is not None or "$" in label else boxed(label)
    gold = parse(text, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"label {label[:80]!r} cannot be read as mathematics")
    return tuple(gold)


def boxed(answer: str) -> str:
    return f"$\\boxed{{{answer}}}$"


# --- DAPO's text --------------------------------------------------------------------------------------------

UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "children", "tickets",
    "multiples",
)  # fmt: skip
UNIT_WORDS = re.compile(rf"\b(?:{'|'.join(UNITS)})\b")
COMMANDS = re.compile(r"\\(?:left|right|displaystyle|quad|[,;!:]|mathrm|\s)")
SIGNS = re.compile(r"\\\$|\\?%|\^\{?\\circ\}?")
WRAPPERS = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|boxed|overline)\s*\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")


def normalise(answer: str) -> str:
    """A final answer without what does not change it: dollars, units, spacing, thousands' commas, text commands
    (in the spirit of arXiv 2206.14858, appendix D.1)."""
    answer = answer.strip().rstrip(".").strip()
    if "$" in answer:
        inside = re.search(r"\$([^$]+)\$", answer)
        answer = inside[1] if inside else answer.replace("$", "")
    answer = SIGNS.sub("", answer)
    while (bare := WRAPPERS.sub(r"\1", answer)) != answer:
        answer = bare
    answer = answer.rpartition("=")[2]
    answer = UNIT_WORDS.sub("", COMMANDS.sub("", answer))
    answer = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    answer = SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = THOUSANDS.sub("", answer)
    answer = re.sub(r"\s+", "", answer).strip(".*")
    return re.sub(r"^(-?\d+)\.0+$", r"\1", answer)
