"""Rewrites an answer, as a person writes it, in the notation that the library `math-verify` reads.

Spellings are replaced by regular expressions. Inequalities and intervals that are joined by "or" become the union of
intervals that they mean.
"""

import re
from collections.abc import Callable

from april.workers.rewards.units import measured

GROUPED = re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f_])+(?=\d{3}(?!\d))")
"""Regular expression for a space between thousands in a number, which the library `math-verify` would read as a
product."""
SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d|\s*/)")
"""Regular expression for a number in groups of three digits, with plain spaces between."""
SIGN = re.compile("[\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}]")
TEXT = r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|[mh]box)\s*"
"""Regular expression for TeX's commands for text, before their brace."""
POWERS = (("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12))
FUNCTION = "(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp"
SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (SIGN, "-"),
    (re.compile(r"\{:\}|\\colon(?![a-z])"), ":"),
    (re.compile(rf"\\(?:operatorname|mathrm|text)\s*\{{\s*({FUNCTION})\s*\}}"), r"\\\1 "),
    *(
        (re.compile(rf"\\text\s*\{{\s*{word}\s*\}}|(?<=\d)\s*{word}\b"), rf"\\times 10^{{{power}}}")
        for word, power in POWERS
    ),
    (re.compile(rf"(?<=\d)\s*(?:{TEXT}\{{\s*)?dozen\b\s*\}}?"), r"\\times 12"),
    (re.compile(r"(?<![a-zA-Z\\])(alpha|beta|gamma|theta|lambda|omega|phi)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(rf"(?<![a-zA-Z\\])({FUNCTION})(?=(?:[xt])?(?![a-zA-Z]))"), r"\\\1 "),
    (re.compile(r"(?<![a-zA-Z\\])sqrt\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile("\N{DEGREE SIGN}"), r"^\\circ "),
    (
        re.compile(
            r"(\\(?:sin|cos|tan|cot|sec|csc) {0,3}[({]? {0,3})(\d+(?:\.\d+)?) {0,3}\^ {0,3}\{? {0,3}\\circ {0,3}\}?"
        ),
        r"\1\\frac{\2\\pi}{180}",
    ),
    (re.compile(rf"(?i)^ {{0,3}}(?:{TEXT}\{{)? {{0,3}}all real(?:s| numbers)\s*\}}?\s*$"), r"\\mathbb{R}"),
    (GROUPED, ""),
    (SPACED, lambda found: found[0].replace(" ", "")),
    (
        re.compile(
            rf"(?<!\d)(\d++)\s{{0,3}}(?:\^\s{{0,3}}\{{?\s{{0,3}})?(?:{TEXT}\{{\s{{0,3}})?(st|nd|rd|th)(?![a-zA-Z])[\s}}]*"
        ),
        lambda found: found[1] if found[2] == ending_of(found[1]) else found[0],
    ),
    (re.compile(rf"(?<!\d)(\d++)\s{{0,3}}(?:{TEXT}\{{)?\s{{0,3}}out of\s*\}}?\s{{0,3}}(\d+)"), r"\\frac{\1}{\2}"),
    (re.compile(rf"(?i)^ {{0,3}}(?:{TEXT}\{{)? {{0,3}}no (?:real )?solutions?\.?\s*\}}?\s*$"), r"\\emptyset "),
    (
        re.compile(r"\\begin\{[pb]matrix\}((?:[^&\\]|\\(?![\\e]))+(?:\\\\(?:[^&\\]|\\(?![\\e]))+)+)\\end\{[pb]matrix\}"),
        lambda found: f"({', '.join(found[1].split(chr(92) * 2))})",
    ),
    (re.compile(r"(?:\\left\s*)?\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"(?:\\right\s*)?\\rangle(?![a-zA-Z])"), ")"),
    (re.compile(r"(?<=\d)\.(?=\s*(?:$|[,;}]))"), ""),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])|\N{GREEK SMALL LETTER PI}"), r"\\pi "),
    (re.compile(r"(?<![a-zA-Z\\])(?:oo|inf|infinity)(?![a-zA-Z])|\N{INFINITY}"), r"\\infty "),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\N{EMPTY SET}"), r"\\emptyset "),
    (re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}"), lambda found: repeating(*found.groups())),
    (re.compile(r"\N{SQUARE ROOT}\s*\(?(\d+)\)?"), r"\\sqrt{\1}"),
    *(
        (re.compile(sign), rf"\\{command} ")
        for sign, command in (
            ("\N{MULTIPLICATION SIGN}", "times"), ("\N{DOT OPERATOR}|\N{MIDDLE DOT}", "cdot"),
            ("\N{LESS-THAN OR EQUAL TO}", "le"), ("\N{GREATER-THAN OR EQUAL TO}", "ge"), ("\N{NOT EQUAL TO}", "neq"),
            ("\N{UNION}", "cup"), ("\N{ELEMENT OF}", "in"), ("\N{PLUS-MINUS SIGN}", "pm"),
        )
    ),
]  # fmt: skip
"""Notations that the library `math-verify` cannot read or would misread: (regular expression, what replaces it)."""


LAST_LETTERS = re.compile(r"(?<=[\s\d}])([A-Za-z]{1,4})\s*$")
"""Regular expression for variables at the end of a product, such as 2rh, which the library `math-verify` would drop as
a unit."""


def spelled(text: str) -> str:
    """The text, with each notation that the library `math-verify` cannot read or would misread replaced by one that it
    reads."""
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    union = union_of(text)
    unit = measured(text)
    if union != text or (unit and unit.certain):
        return union
    return LAST_LETTERS.sub(lambda found: "".join(f"{{{letter}}}" for letter in found[1]), text)


def ending_of(number: str) -> str:
    """The English ending of an ordinal number: st, nd, rd or th."""
    return "th" if number[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")


def repeating(whole: str, decimals: str, period: str) -> str:
    """A repeating decimal as a fraction in TeX. `whole`, `decimals`, `period`: its digits before the point, after the
    point, and the digits that repeat."""
    nines = "9" * len(period) + "0" * len(decimals)
    return rf"\frac{{{int(whole + decimals + period) - int(whole + decimals or '0')}}}{{{nines}}}"


# --- alternatives with "or" -------------------------------------------------------------------------------------------

OR = re.compile(
    r"(?:\s|,|\\q?quad|\\[,;: ])*(?:\\(?:text\w*|mathrm|mbox)\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-z])|\bor\b)"
    r"(?:\s|\\q?quad|\\[,;: ])*"
)
"""Regular expression for the word *or*."""
INTERVAL = re.compile(r"(?:([a-z]|\\[a-z]+)\s*\\in\s*)?((?:\\left)?[(\[].+[)\]]|\\\{.+\\\})")
RELATION = re.compile(r"(<=|>=|<|>|=|\\(?:le|ge|lt|gt)q?(?:slant)?(?![a-z]))")
UNKNOWN = re.compile(r"[a-z]|\\(?:theta|alpha|lambda|phi)")
SET_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*(?:\\mid|\\vert|[|:])(.+)\\\}")


def union_of(text: str) -> str:
    """The union of intervals that alternatives with "or" mean, such as x < 1 or x > 3; any other text unchanged."""
    if builder := SET_BUILDER.fullmatch(text.strip()):
        text = builder[1].strip()
    parts = [part.strip(" $") for part in OR.split(text)]
    found = [interval(part) for part in parts]
    sets = [each for each in found if each]
    if len(parts) < 2 or len(sets) < len(parts) or all(each.startswith(r"\{") for _, each in sets):
        return text
    return r"\cup ".join(each for _, each in sets) if len({name for name, _ in sets} - {""}) < 2 else text


def interval(part: str) -> tuple[str, str] | None:
    """(unknown, its interval or set in TeX) of an inequality, an equation or an interval; None for anything else."""
    if found := INTERVAL.fullmatch(part):
        return found[1] or "", found[2]
    terms = [term.strip() for term in RELATION.split(part)]
    unknown = next((index for index in (0, 2) if index < len(terms) and UNKNOWN.fullmatch(terms[index])), None)
    if unknown is None or len(terms) not in (3, 5) or (len(terms) == 5 and unknown != 2):
        return None
    if terms[1] == "=" and len(terms) == 3:
        return terms[unknown], rf"\{{{terms[2 - unknown]}\}}"
    lower, upper = r"(-\infty", r"\infty)"
    for at, sign in ((unknown - 2, unknown - 1), (unknown + 2, unknown + 1)):
        if 0 <= at < len(terms):
            is_less, is_closed = terms[sign].strip("\\")[0] in "<l", terms[sign].strip("\\")[1:2] in ("=", "e")
            if is_less == (at < unknown):
                lower = ("[" if is_closed else "(") + terms[at]
            else:
                upper = terms[at] + ("]" if is_closed else ")")
    return terms[unknown], f"{lower}, {upper}"
