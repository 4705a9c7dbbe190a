"""How GSM8K writes an answer: a solution ends in `#### 1,080`, a number behind a mark.

Solutions of the dataset and responses of a policy are read by the same rules. A number may have a sign, a currency
sign, commas and decimals; what follows it on the line, such as a unit or a full stop, does not count. Fractions and
powers are no numbers here, since their first half would be taken for the whole.
"""

import re

MARK = "####"
AROUND = r"[ \t$€£*\\]*+"
"""spaces, currency signs and the stars of bold text"""
DIGITS = r"(?>[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)"
LEADING = re.compile(rf"{AROUND}([-+−]?){AROUND}({DIGITS})(?![ \t]*+[/^][ \t]*+[0-9])")
ANYWHERE = re.compile(rf"([-−]?)({DIGITS})")


def final_number(text: str) -> str | None:
    """The number behind the last mark that one stands behind, as `-1080.5`; None if there is none."""
    numbers = map(leading_number, reversed(text.split(MARK)[1:]))
    return next(filter(None, numbers), None)


def leading_number(text: str) -> str | None:
    """The number that a text begins with, on its first line."""
    found = LEADING.match(text)
    return plain(*found.groups()) if found else None


def last_number(text: str) -> str | None:
    """The last number anywhere in a text."""
    found = ANYWHERE.findall(text)
    return plain(*found[-1]) if found else None


def plain(sign: str, digits: str) -> str:
    return ("-" if sign in ("-", "−") else "") + digits.replace(",", "")
