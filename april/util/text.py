"""Counts and sizes as text; numbers in the text of an answer; the prefix of the names of some rewards."""

import re

GROUP_REWARD = "group:"
"""Prefix of the name of a reward that scores all responses of a prompt together."""
ROW_PROMPT_REWARDS = ("trl:", "trl_text:", "verifiers:")
"""Prefixes of rewards whose functions get the prompt as the row has it, besides its text."""


def takes_row_prompt(reward: str) -> bool:
    """Whether the named reward gets the prompt as the row has it."""
    return reward.removeprefix(GROUP_REWARD).startswith(ROW_PROMPT_REWARDS)


def counted(count: int, singular: str, plural: str = "") -> str:
    """The count with its noun, such as `3 workers` or `1 worker`; the plural is the singular with an s unless given."""
    return f"{count} {singular}" if count == 1 else f"{count} {plural or singular + 's'}"


def format_bytes(count: float) -> str:
    """A number of bytes with a binary unit, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


# --- numbers in an answer ---------------------------------------------------------------------------------------------

ANSWER_MARK = "####"
AROUND = r"[ \t$€£*\\]*+"
"""Regular expression for what may surround a number: spaces, currency signs and the asterisks of bold text."""
DIGITS = r"(?>[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)"
LEADING_NUMBER = re.compile(rf"{AROUND}([-+−]?){AROUND}({DIGITS})(?![ \t]*+[/^][ \t]*+[0-9])")
ANY_NUMBER = re.compile(rf"([-−]?)({DIGITS})")


def final_number(text: str) -> str | None:
    """The number after the last `####` that a number follows, written like `-1080.5`; None if there is none."""
    numbers = map(leading_number, reversed(text.split(ANSWER_MARK)[1:]))
    return next(filter(None, numbers), None)


def leading_number(text: str) -> str | None:
    """The number at the start of a text, written like `-1080.5`; None if there is none."""
    found = LEADING_NUMBER.match(text)
    return plain_number(*found.groups()) if found else None


def last_number(text: str) -> str | None:
    """The last number in a text, written like `-1080.5`; None if there is none."""
    found = ANY_NUMBER.findall(text)
    return plain_number(*found[-1]) if found else None


def plain_number(sign: str, digits: str) -> str:
    return ("-" if sign in ("-", "−") else "") + digits.replace(",", "")
