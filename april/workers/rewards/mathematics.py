"""Verifiers of mathematical answers: `math` by equivalence, `deepscaler` and `dapo` by the papers' rules.

The `math-verify` library decides equivalence: fractions, units, sets, intervals, equations, matrices. Its own time
limits use the process's alarm signal, and its errors count as "not equal". Both are turned off: a verifier process has
a hard time limit, and an error must not become a reward. A label, and an answer in a box, are read whole or not at all:
the library's other ways of reading would take the last number of a text that they do not understand.
"""

import logging
import math as floats
import re
from functools import lru_cache
from itertools import accumulate
from typing import Any

from april.workers.rewards.kinds import are_opposed, compared_congruences, congruence_of
from april.workers.rewards.messages import Undecided, right_or_wrong
from april.workers.rewards.spellings import GROUPED, SIGN, spelled, union_of
from april.workers.rewards.text import (
    END_OF_THINKING,
    after_phrase,
    after_thinking,
    boxes,
    in_lines,
    last_boxed,
    without_end,
)
from april.workers.rewards.units import in_radians, measured, unit_behind, with_unit

logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_CHARACTERS = 2000
"""Longest answer that is parsed (characters)."""
DEEPEST = 50
"""Maximum depth of nested brackets in an answer that is parsed; the parser's time grows with the depth."""
TAIL_CHARACTERS = 300
"""Number of characters at the end of a response in which DAPO looks for the answer."""
RESPONSE_MARK = "###Response"
DOLLAR = re.compile(r"(?<!\\)\$")
"""Regular expression for a dollar sign that begins or ends a formula; `\\$` is a currency."""

TEXT_LABEL = re.compile(r"[\w\s.,:;'/-]+")
"""Regular expression for a label that is compared as text if it cannot be read as mathematics, such as a time."""
BETWEEN_BOXES = re.compile(
    r"(?:[\s$&]|\\[()\[\]]|\\q?quad|\\text\s*\{|\}|[a-zA-Z]\s*=|(?P<joined>[,;]|\b(?:and|or)\b))*"
)
"""Regular expression for the text between two boxes that together give one answer, such as the word "and"."""

Detailed = tuple[float, dict[str, float]]


@right_or_wrong
def math(response: str, label: str, finish_reason: str) -> Detailed:
    """1.0 iff the answer is equivalent to the label.

    The answer is the last box after the reasoning. Without a box it is what the library `math-verify` finds in the text
    after the reasoning, such as a formula after "the answer is".
    """
    text = after_thinking(response)
    answer = boxed_answer(text)
    if answer is not None and (wanted := measured(label_text(label))) and wanted.dimension:
        answer = with_unit(answer, text[boxes(text)[-1][1] :])
    correct = equivalent(label, in_lines(text) if answer is None else answer, whole=answer is not None)
    return float(correct), {"boxed": float(answer is not None)}


@right_or_wrong
def deepscaler(response: str, label: str, finish_reason: str) -> Detailed:
    """1.0 iff the reasoning ends with `</think>` (or `###Response`), and the last box after it is equivalent to the
    label."""
    mark = END_OF_THINKING if END_OF_THINKING in response else RESPONSE_MARK
    _, found, text = response.rpartition(mark)
    answer = boxed_answer(text) if found else None
    details = {"closed": float(bool(found)), "boxed": float(answer is not None)}
    return float(answer is not None and equivalent(label, answer)), details


def dapo(response: str, label: str, finish_reason: str) -> Detailed:
    """+1.0 iff the text after the last "Answer:" near the response's end equals the label once both are normalised,
    otherwise -1.0 (arXiv 2503.14476, section 2.4). Raises ValueError for an empty label."""
    wanted = normalise(last_boxed(label) or label)
    if not wanted:
        raise ValueError(f"label {label[:80]!r} is empty")
    answer = after_phrase(in_lines(without_end(response)[-TAIL_CHARACTERS:]), "answer")
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


def boxed_answer(text: str) -> str | None:
    """The content of the last box, or of the last boxes together if only commas or "and" stand between them."""
    last: list[str] = []
    end = -1
    for start, stop, content in boxes(text):
        between = BETWEEN_BOXES.fullmatch(text, end, start) if last else None
        last = [*last, content] if between and between["joined"] else [content]
        end = stop
    return ", ".join(dict.fromkeys(last)) if last else None


def equivalent(label: str, answer: str, whole: bool = True) -> bool:
    """Whether an answer is equivalent to the label.

    `whole`: whether the answer is the content of a box; otherwise it is a text in which the library `math-verify` looks
    for the answer. Raises ValueError for a label that cannot be read, Undecided for an answer at which the library
    fails.
    """
    gold = parsed_label(label)
    if len(answer) > ANSWER_CHARACTERS:
        if whole:
            return False
        answer = answer[-ANSWER_CHARACTERS:]
    if whole and depth(answer) > DEEPEST:
        return False
    if whole and (decided := compared_as_text(label_text(label), answer)) is not None:
        return decided
    try:
        if whole and (angles := in_radians(label_text(label), answer)):
            return _equal(*map(read_whole, angles))
        found = read_whole(answer) if whole else read_within(answer)
        if (
            decided := compared_by_units(label_text(label), answer, "" if whole else str((found or [""])[-1]))
        ) is not None:
            return decided
        return _equal(list(gold), found)
    except MemoryError:
        raise
    except Exception as error:
        raise Undecided(f"{type(error).__name__} at the answer {answer[-60:]!r}") from error


def depth(text: str) -> int:
    """Most brackets and braces that are open at once."""
    steps = (1 if sign in "([{" else -1 for sign in text if sign in "()[]{}")
    return max(accumulate(steps), default=0)


def compared_by_units(label: str, answer: str, found: str) -> bool | None:
    """Whether label and answer are equal, if one of them has a unit of measurement; None if units do not decide it, so
    that the library `math-verify` has to compare them. `found`: the value that this library found in `answer`, if
    `answer` is a whole text; "" if `answer` is the content of a box."""
    wanted, given = measured(label), unit_behind(found, answer) if found else measured(answer)
    if wanted and given:
        if wanted.contradicts(given):
            return False
        if wanted.dimension and given.dimension and wanted.factor != given.factor:
            return _equal(read_whole(wanted.in_base_units()), read_whole(given.in_base_units()))
    units = [unit for unit in (wanted, given) if unit]
    if not units or not all(unit.certain for unit in units):
        return None
    texts = wanted.value if wanted else label, given.value if given else found or answer
    return _equal(*map(read_whole, texts)) or None


@lru_cache(maxsize=10_000)
def parsed_label(label: str) -> tuple:
    delimited = last_boxed(label) is None and len(DOLLAR.findall(label)) > 1
    unit = measured(label_text(label))
    if unit and unit.certain:
        label = unit.value
    if congruence := congruence_of(label_text(label)):
        label = ", ".join(map(str, sorted(congruence.residues)))
    if (joined := DOLLAR.sub("", label)) != union_of(joined):
        label, delimited = joined, False
    gold = read_within(label) if delimited and not unit else read_whole(label_text(label))
    if not gold or (isinstance(gold[0], str) and not TEXT_LABEL.fullmatch(gold[0])):
        raise ValueError(f"label {label[:80]!r} cannot be read as mathematics")
    return tuple(gold)


def label_text(label: str) -> str:
    inside = last_boxed(label)
    return label if inside is None else inside


def read_whole(answer: str) -> list[Any]:
    """The answer as expressions of the library `math-verify`, if all of it is TeX that this library understands;
    otherwise as a string."""
    from math_verify import LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0)
    return parse(f"$\\boxed{{{spelled(answer)}}}$", [latex], parsing_timeout=None, raise_on_error=True)


def read_within(text: str) -> list[Any]:
    """The answer in a text, as the expressions that `math_verify` parses it into."""
    from math_verify import parse

    return parse(GROUPED.sub("", SIGN.sub("-", text)), parsing_timeout=None, raise_on_error=True)


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify
    from sympy import nan, zoo

    gold, answer = [list(map(complex_unit, values)) for values in (gold, answer)]
    if not answer or contradicts(answer[0]) or any(values[0] in (zoo, nan) for values in (gold, answer)):
        return False
    if (smallest := magnitude(gold[0])) < TINY:
        factor = 10 ** -floats.floor(floats.log10(smallest))
        gold, answer = [[scaled(value, factor) for value in values] for values in (gold, answer)]
    return verify(gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True)


NUMERAL = re.compile(r"\(?([0-9A-Za-z]+)\)?_\s*\{?\s*(\d{1,2})\s*\}?")
"""Regular expression for a number with its base as subscript."""
TIME = re.compile(r"(?i)(\d{1,2}(?:(?::\d\d){1,2}(?=[ap]?)|(?=[ap])))(?:([ap])\.?m\.?)?")
"""Regular expression for a time of day: with a colon, or with am or pm."""
ROMAN = re.compile(r"(?=[IVX]{2})X{0,3}(?:IX|IV|V?I{0,3})")
WORDS = re.compile(r"[A-Za-z]{4,}|(?i:yes|no|odd|dne)|[A-Za-z]+(?:[\s'-]+[A-Za-z]+)+")
SYNONYMS = {"dne": "does not exist", "undefined": "not defined"}
POINTS = re.compile(r"(\\angle|\\triangle|\\overline)?\s*\{?\s*([A-Z]{2,})\s*\}?")
"""Regular expression for the name of a segment, an angle or a figure."""
GROUPS = re.compile(r"\{[^{}]*\}")
EQUATION = re.compile(r"(?=[^=<>]*[A-Za-z])[^=<>]*[\w)]\s*[+-][^=<>]*=")
"""Regular expression for a label that is an equation with a sum of unknowns on its left, such as x + y = 1. An answer
that gives only the right side is wrong."""
FUNCTIONS = re.compile(r"\b(?:a?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|frac|pi)\b")


def compared_as_text(label: str, answer: str) -> bool | None:
    """Whether label and answer are equal, if this can be told from their texts, as for words, times or numbers in a
    base; None if they have to be compared by the library `math-verify`.

    The library reads a word as the product of its letters, and does not read the base of a number.
    """
    if is_same_text(label, answer):
        return True
    if (decided := compared_congruences(label, answer)) is not None:
        return decided
    if not in_radians(label, answer) and are_opposed(label, answer):
        return False
    if "=" not in answer and EQUATION.match(GROUPS.sub("", label)):
        return False
    wanted, found = (normalise(SIGN.sub("-", text)) for text in (label, answer))
    if time := TIME.fullmatch(wanted):
        given_time = TIME.fullmatch(found)
        return given_time is not None and is_same_time(time, given_time)
    if ROMAN.fullmatch(wanted) and ROMAN.fullmatch(found):
        return wanted == found
    points, given = POINTS.fullmatch(label.strip(" $")), POINTS.fullmatch(answer.strip(" $"))
    if points and given:
        return are_same_points(points, given)
    wanted_base, found_base = (NUMERAL.fullmatch(text.strip(" $")) for text in (label, answer))
    if wanted_base and found_base:
        values = [value_in_base(*each.groups()) for each in (wanted_base, found_base)]
        return values[0] == values[1] if None not in values else wanted_base.groups() == found_base.groups()
    if wanted_base and value_in_base(*wanted_base.groups()) is not None:
        return wanted_base[1].lower() == found.lower()
    if found_base and wanted.isdigit():
        return value_in_base(*found_base.groups()) == int(wanted)
    if spelled(label).strip() == spelled(answer).strip() in (r"\emptyset", r"\mathbb{R}"):
        return True
    texts = [unwrapped(text) for text in (label, answer)]
    if all(WORDS.fullmatch(text) and not FUNCTIONS.search(text) for text in texts):
        one, other = (SYNONYMS.get(text, text) for text in (" ".join(text.casefold().split()) for text in texts))
        return one == other
    return None


def are_same_points(label: re.Match[str], answer: re.Match[str]) -> bool | None:
    """Whether two names made of points, such as AB, mean the same; None if one is, say, an angle and the other a
    triangle.

    The letters of a pair (a segment, or a product) and of a triangle may be in any order; those of an angle may be
    reversed. In any other name the order counts.
    """
    kinds, (one, other) = {found[1] or "" for found in (label, answer)}, (label[2], answer[2])
    if len(kinds - {""}) > 1:
        return None
    if kinds & {r"\triangle"} or len(one) == len(other) == 2:
        return sorted(one) == sorted(other)
    return other in ((one, one[::-1]) if r"\angle" in kinds else (one,))


def is_same_time(label: re.Match[str], answer: re.Match[str]) -> bool:
    """Whether two times are the same; am and pm have to agree if the label has one, and are ignored if it has none."""
    halves = [(found[2] or "").lower() for found in (label, answer)]
    times = [[int(part) for part in found[1].split(":")] for found in (label, answer)]
    if halves[0]:
        times = [time + [0] * (3 - len(time)) for time in times]
    return times[0] == times[1] and halves[0] in ("", halves[1])


def is_same_text(label: str, answer: str) -> bool:
    """Whether two texts are the same apart from fonts, dollars, TeX's spacing and a full stop. Nothing that stands
    between two numbers or before a sign of relation is ignored."""
    texts = [COMMANDS.sub("", SPACES.sub(comma_or_space, FONTS.sub(r"\1", SIGN.sub("-", t)))) for t in (label, answer)]
    one, other = (" ".join(text.replace("$", "").split()).rstrip(".").strip() for text in texts)
    return one == other != ""


def value_in_base(digits: str, base: str) -> int | None:
    """The value of digits in a base; None for an invalid digit or base, and for one letter, which is a variable."""
    try:
        return None if len(digits) == 1 and digits.isalpha() else int(digits, int(base))
    except ValueError:
        return None


# --- expressions --------------------------------------------------------------------------------------------------

TINY = 1e-3
"""Numbers below this are scaled up before they are compared: the library `math-verify` rounds to six decimals, and
treats smaller ones as 0."""


def complex_unit(value: Any) -> Any:
    """The expression with the letter i as the imaginary unit, if i is its only symbol."""
    from sympy import Expr, I

    symbols = value.free_symbols if isinstance(value, Expr) else set()
    if {str(symbol) for symbol in symbols} != {"i"}:
        return value
    return value.subs(dict.fromkeys(symbols, I)).doit()


def contradicts(value: Any) -> bool:
    """Whether an expression is an equation between numbers that differ, such as 7 = 8."""
    from sympy import And, Eq

    equations = value.args if isinstance(value, And) else [value]
    return any(
        isinstance(equation, Eq) and not equation.free_symbols and abs(complex(equation.lhs - equation.rhs)) > 1e-6
        for equation in equations
    )


def magnitude(value: Any) -> float:
    """The smallest absolute value of the numbers that an expression is or lists, except 0; infinite without one."""
    from sympy import Expr, FiniteSet, Tuple

    if isinstance(value, FiniteSet | Tuple):
        return min(map(magnitude, value.args), default=floats.inf)
    if not isinstance(value, Expr) or not value.is_number or not value.is_finite:
        return floats.inf
    return abs(complex(value.evalf())) or floats.inf


def scaled(value: Any, factor: int) -> Any:
    """An expression with its number or numbers multiplied by a factor."""
    from sympy import Expr, FiniteSet, Tuple

    if isinstance(value, FiniteSet | Tuple):
        return value.func(*(scaled(part, factor) for part in value.args))
    return (value * factor).doit() if isinstance(value, Expr) else value


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
SPACES = re.compile(r"\\(?:[,;:!>]|\s|$)|~|\{[,:]\}(?=\d)|\\(?:q?quad|thinspace)\b")
"""Regular expression for TeX's spacing commands, and for a comma or colon in braces, which TeX sets without a space."""
COMMANDS = re.compile(r"\\(?:left|right|displaystyle|mathrm)(?![a-z])")
SIGNS = re.compile(r"\\?%|\^\{?\\circ\}?")
WRAPPERS = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|[mhf]box|boxed|overline)\s*\{([^{}]*)\}")
FONTS = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|[mhf]box|boxed)\s*\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
NUMBER = re.compile(r"([-+]?)0*(\d*)(?:(\.\d*?)0*)?")


def unwrapped(answer: str) -> str:
    """An answer without TeX's commands for text and fonts."""
    while (bare := WRAPPERS.sub(r"\1", answer)) != answer:
        answer = bare
    return answer.strip().rstrip(".").strip()


def normalise(answer: str) -> str:
    """Normalise a final answer: drop dollars, units, spacing, thousands' commas, text commands and redundant zeros.

    Similar to arXiv 2206.14858, appendix D.1. An answer that is only a unit stays as it is.
    """
    answer = BRACKETS.sub("", without_end(answer))
    answer = (
        CURRENCY.sub("", answer.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-"))
        .strip()
        .rstrip(".,;")
        .strip()
    )
    if "$" in answer:
        inside = re.search(r"\$([^$]+)\$", answer)
        answer = inside[1] if inside else answer.replace("$", "")
    answer = unwrapped(SIGNS.sub("", answer))
    answer = COMMANDS.sub("", SPACES.sub(comma_or_space, answer.rpartition("=")[2]))
    answer = UNIT_WORDS.sub("", answer) if UNIT_WORDS.sub("", answer).strip() else answer
    answer = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    answer = SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = THOUSANDS.sub("", answer)
    return plain_number(re.sub(r"\s+", "", answer).strip("*").rstrip("."))


def comma_or_space(found: re.Match) -> str:
    return found[0].strip("{}") if found[0].startswith("{") else ""


def plain_number(text: str) -> str:
    """A decimal number without redundant zeros and plus sign; other text unchanged."""
    number = NUMBER.fullmatch(text)
    if not number or not any(map(str.isdigit, text)):
        return text
    sign, whole, decimals = number[1], number[2] or "0", number[3] or ""
    value = whole + (decimals if len(decimals) > 1 else "")
    return f"-{value}" if sign == "-" and value != "0" else value
