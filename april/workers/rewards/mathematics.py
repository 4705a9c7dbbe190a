"""Verifiers of mathematical answers: `math` by meaning, `deepscaler` and `dapo` by the rules of these works.

Equality of meaning is the `math-verify` library's: fractions, units, sets, intervals, equations, matrices. Its own
time limits use the alarm signal of the process, and its errors count as "not equal"; both are turned off, since a
verifier's process has a time limit that kills, and an error is no reward.
"""

import logging
import re
from functools import lru_cache

from april.workers.rewards.answers import END_OF_THINKING, after_phrase, after_thinking, last_boxed
from april.workers.rewards.messages import Undecided

logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_CHARACTERS = 2000
"""a longer answer is no answer, but would keep a parser busy"""
TAIL_CHARACTERS = 300
"""DAPO looks for the answer in the end of a response only"""
RESPONSE_MARK = "###Response"
DOLLAR = re.compile(r"(?<!\\)\$")
"""one that begins or ends mathematics; `\\$` is a currency"""

GROUPED = re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])+(?=\d{3}(?!\d))")
"""a space between the thousands of a number, which the library reads as a product"""

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
    otherwise -1.0 (arXiv 2503.14476, section 2.4). Raises ValueError for an empty label."""
    wanted = normalise(last_boxed(label) or label)
    if not wanted:
        raise ValueError(f"label {label[:80]!r} is empty")
    answer = after_phrase(response[-TAIL_CHARACTERS:], "answer")
    correct = answer is not None and normalise(answer) == wanted
    return (1.0 if correct else -1.0), {"correct": float(correct), "answered": float(answer is not None)}


# --- meaning ------------------------------------------------------------------------------------------------


def boxed_label(label: str) -> str:
    """As it is, where it is in a box already."""
    return label if last_boxed(label) is not None else f"\\boxed{{{label}}}"


for verifier in (math, deepscaler):
    vars(verifier)["needs"] = "math_verify"  # of the `rewards` extra, imported when it is first used
vars(math)["example"] = boxed_label
vars(deepscaler)["example"] = lambda label: f"{END_OF_THINKING}{boxed_label(label)}"
vars(dapo).update(wrong=-1.0, example="Answer: {}".format)


def same_meaning(label: str, text: str) -> bool:
    """Whether the answer in `text` means the label. Raises ValueError for a label that says nothing, Undecided for an
    answer at which the library fails."""
    from math_verify import parse, verify

    gold = parsed_label(label)
    try:
        answers = parse(GROUPED.sub("", text[-ANSWER_CHARACTERS:]), parsing_timeout=None, raise_on_error=True)
        return bool(answers) and verify(list(gold), answers, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception as error:
        raise Undecided(f"{type(error).__name__} at the answer {text[-60:]!r}") from error


@lru_cache(maxsize=10_000)
def parsed_label(label: str) -> tuple:
    from math_verify import parse

    delimited = last_boxed(label) is not None or len(DOLLAR.findall(label)) > 1
    text = label if delimited else boxed(label)
    gold = parse(GROUPED.sub("", text), parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"label {label[:80]!r} cannot be read as mathematics")
    return tuple(gold)


def boxed(answer: str) -> str:
    """For the library to read; nothing of an answer that is too long to be one."""
    return f"$\\boxed{{{answer}}}$" if len(answer) < ANSWER_CHARACTERS - len(r"$\boxed{}$") else ""


# --- DAPO's text --------------------------------------------------------------------------------------------

UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "children", "tickets",
    "multiples",
)  # fmt: skip
UNIT_WORDS = re.compile(rf"\b(?:{'|'.join(UNITS)})\b")
CURRENCY = re.compile(r"\\\$|\\textdollar\b")
BRACKETS = re.compile(r"\\[()\[\]]")
"""in which TeX sets mathematics, as in dollars"""
SPACES = re.compile(r"\\(?:[,;:!>]|\s|$)|~|\{,\}(?=\d)|\\(?:q?quad|thinspace)\b")
"""those of TeX, and the comma that it sets without one"""
COMMANDS = re.compile(r"\\(?:left|right|displaystyle|mathrm)(?![a-z])")
SIGNS = re.compile(r"\\?%|\^\{?\\circ\}?")
WRAPPERS = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|[mhf]box|boxed|overline)\s*\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
NUMBER = re.compile(r"([-+]?)0*(\d*)(?:(\.\d*?)0*)?")


def normalise(answer: str) -> str:
    """A final answer without what does not change it: dollars, units, spacing, thousands' commas, text commands, zeros
    around a number (in the spirit of arXiv 2206.14858, appendix D.1). A word that is only a unit stays what it is."""
    answer = BRACKETS.sub("", answer)
    answer = (
        CURRENCY.sub("", answer.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")).strip().rstrip(".").strip()
    )
    if "$" in answer:
        inside = re.search(r"\$([^$]+)\$", answer)
        answer = inside[1] if inside else answer.replace("$", "")
    answer = SIGNS.sub("", answer)
    while (bare := WRAPPERS.sub(r"\1", answer)) != answer:
        answer = bare
    answer = COMMANDS.sub("", SPACES.sub(comma_or_space, answer.rpartition("=")[2]))
    answer = UNIT_WORDS.sub("", answer) if UNIT_WORDS.sub("", answer).strip() else answer
    answer = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    answer = SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = THOUSANDS.sub("", answer)
    return plain_number(re.sub(r"\s+", "", answer).strip("*").rstrip("."))


def comma_or_space(found: re.Match) -> str:
    return "," if found[0] == "{,}" else ""


def plain_number(text: str) -> str:
    """A decimal number without zeros that say nothing, and without a plus; another text as it is."""
    number = NUMBER.fullmatch(text)
    if not number or not any(map(str.isdigit, text)):
        return text
    sign, whole, decimals = number[1], number[2] or "0", number[3] or ""
    value = whole + (decimals if len(decimals) > 1 else "")
    return f"-{value}" if sign == "-" and value != "0" else value
