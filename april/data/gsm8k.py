"""Parses GSM8K answers: a solution ends in `#### 1,080`, a number after a mark.

The dataset's solutions and a policy's responses are parsed by the same rules. A number may have a sign, a currency
sign, commas and decimals; the rest of the line, such as a unit or a full stop, is ignored. Fractions and powers are
not parsed, since their first operand would be taken for the whole number.
"""

import re

MARK = "####"
AROUND = r"[ \t$€£*\\]*+"
"""Spaces, currency signs and the asterisks of bold text, allowed around a number."""
DIGITS = r"(?>[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)"
LEADING = re.compile(rf"{AROUND}([-+−]?){AROUND}({DIGITS})(?![ \t]*+[/^][ \t]*+[0-9])")
ANYWHERE = re.compile(rf"([-−]?)({DIGITS})")


def final_number(text: str) -> str | None:
    """The number after the last mark that is followed by one, as `-1080.5`; None if there is none."""
    numbers = map(leading_number, reversed(text.split(MARK)[1:]))
    return next(filter(None, numbers), None)


def leading_number(text: str) -> str | None:
    """The number at the start of a text, as `-1080.5`; None if there is none."""
    found = LEADING.match(text)
    return plain(*found.groups()) if found else None


def last_number(text: str) -> str | None:
    """The last number in a text, as `-1080.5`; None if there is none."""
    found = ANYWHERE.findall(text)
    return plain(*found[-1]) if found else None


def plain(sign: str, digits: str) -> str:
    return ("-" if sign in ("-", "−") else "") + digits.replace(",", "")
