"""Verifiers of mathematical answers: `math` by equivalence, `deepscaler` and `dapo` by the papers' rules.

The `math-verify` library decides equivalence: fractions, units, sets, intervals, equations, matrices. Its own time
limits use the process's alarm signal, and its errors count as "not equal". Both are turned off: a verifier process has
a hard time limit, and an error must not become a reward.
"""

import logging
import re
from functools import lru_cache

from april.workers.rewards.messages import Undecided
from april.workers.rewards.text import END_OF_THINKING, after_phrase, after_thinking, last_boxed

logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_CHARACTERS = 2000
"""Longest answer that is parsed (characters)."""
TAIL_CHARACTERS = 300
"""Number of characters at the end of a response in which DAPO looks for the answer."""
RESPONSE_MARK = "###Response"
DOLLAR = re.compile(r"(?<!\\)\$")
"""Regular expression for a dollar sign that begins or ends a formula; `\\$` is a currency."""

GROUPED = re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])+(?=\d{3}(?!\d))")
"""Regular expression for a space between thousands in a number, which the library would read as a product."""

Detailed = tuple[float, dict[str, float]]


def math(response: str, label: str, finish_reason: str) -> Detailed:
    """1.0 iff the answer is equivalent to the label.

    The answer is the last box after the reasoning; without a box it is what the library finds in that text, such as a
    formula after "the answer is".
    """
    text = after_thinking(response)
    answer = last_boxed(text)
    correct = equivalent(label, text if answer is None else boxed(answer))
    return float(correct), {"boxed": float(answer is not None)}


def deepscaler(response: str, label: str, finish_reason: str) -> Detailed:
    """1.0 iff the reasoning ends with `</think>` (or `###Response`), and the last box after it is equivalent to the
    label."""
    mark = END_OF_THINKING if END_OF_THINKING in response else RESPONSE_MARK
    _, found, text = response.rpartition(mark)
    answer = last_boxed(text) if found else None
    details = {"closed": float(bool(found)), "boxed": float(answer is not None)}
    return float(answer is not None and equivalent(label, boxed(answer))), details


def dapo(response: str, label: str, finish_reason: str) -> Detailed:
    """+1.0 iff the text after the last "Answer:" near the response's end equals the label once both are normalised,
    otherwise -1.0 (arXiv 2503.14476, section 2.4). Raises ValueError for an empty label."""
    wanted = normalise(last_boxed(label) or label)
    if not wanted:
        raise ValueError(f"label {label[:80]!r} is empty")
    answer = after_phrase(response[-TAIL_CHARACTERS:], "answer")
    correct = answer is not None and normalise(answer) == wanted
    return (1.0 if correct else -1.0), {"correct": float(correct), "answered": float(answer is not None)}


# --- equivalence ------------------------------------------------------------------------------------------------


def boxed_label(label: str) -> str:
    """The label in a box, unless it has one already."""
    return label if last_boxed(label) is not None else f"\\boxed{{{label}}}"


for verifier in (math, deepscaler):
    vars(verifier)["needs"] = "math_verify"  # of the `rewards` extra, imported when it is first used
vars(math)["example"] = boxed_label
vars(deepscaler)["example"] = lambda label: f"{END_OF_THINKING}{boxed_label(label)}"
vars(dapo).update(wrong=-1.0, example="Answer: {}".format)


def equivalent(label: str, text: str) -> bool:
    """Whether the answer in `text` is equivalent to the label.

    Raises ValueError for a label that cannot be parsed, Undecided for an answer at which the library fails.
    """
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
    """The answer as boxed TeX for the library; empty if it is longer than ANSWER_CHARACTERS."""
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
"""Regular expression for TeX's delimiters of a formula: a backslash and a bracket."""
SPACES = re.compile(r"\\(?:[,;:!>]|\s|$)|~|\{,\}(?=\d)|\\(?:q?quad|thinspace)\b")
"""Regular expression for TeX's spacing commands, and for `{,}`, a comma without a space."""
COMMANDS = re.compile(r"\\(?:left|right|displaystyle|mathrm)(?![a-z])")
SIGNS = re.compile(r"\\?%|\^\{?\\circ\}?")
WRAPPERS = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|[mhf]box|boxed|overline)\s*\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
NUMBER = re.compile(r"([-+]?)0*(\d*)(?:(\.\d*?)0*)?")


def normalise(answer: str) -> str:
    """Normalise a final answer: drop dollars, units, spacing, thousands' commas, text commands and redundant zeros.

    Similar to arXiv 2206.14858, appendix D.1. An answer that is only a unit stays as it is.
    """
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
    """A decimal number without redundant zeros and plus sign; other text unchanged."""
    number = NUMBER.fullmatch(text)
    if not number or not any(map(str.isdigit, text)):
        return text
    sign, whole, decimals = number[1], number[2] or "0", number[3] or ""
    value = whole + (decimals if len(decimals) > 1 else "")
    return f"-{value}" if sign == "-" and value != "0" else value
