"""Counts and sizes as text; configurations without their secrets; numbers in the text of an answer; the prefix of the
names of some rewards."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

GROUP_REWARD = "group:"
"""Prefix of the name of a reward that scores all responses of a prompt together."""
ROW_PROMPT_REWARDS = ("trl:", "trl_text:", "verifiers:")
"""Prefixes of rewards whose functions get the prompt as in the dataset row (text or messages), besides the rendered
text."""


def takes_row_prompt(reward: str) -> bool:
    """Whether the named reward's function gets the prompt as in the dataset row (`ROW_PROMPT_REWARDS`)."""
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


def cut_in_middle(text: str, characters: int) -> str:
    """Shorten a text to at most `characters` (1 or more): its beginning and end, with an ellipsis between them.
    Unprintable characters other than newlines and tabs become spaces."""
    if len(text) > characters:
        begin, end = characters // 2, (characters - 1) // 2
        text = f"{text[:begin]}…{text[len(text) - end :]}"
    return "".join(each if each.isprintable() or each in "\n\t" else " " for each in text)


# --- secrets ----------------------------------------------------------------------------------------------------------


MASK = "…"
"""Text in place of a secret."""
SECRET_WORD = (
    r"(?:api_?keys?|secrets?"
    r"|(?<![^\W_])(?:keys?|token|pass(?:word|wd|phrase)?|credentials?|auth|authorization|bearer))"
)
SECRET_NAME = re.compile(f"{SECRET_WORD}$", re.IGNORECASE)
"""Regular expression for the name of an option, a variable or a header that holds a secret."""
HARMLESS_NAMES = {"hint_key", "images_key", "keys", "label_key", "prompt_key", "tools_key"}
"""Keys of April's configuration whose names look like secrets but are not: a folder of keys, and names of columns."""
URL_QUERY = re.compile(r"""(://[^\s'"?#]*\?)[^\s'"#]*=[^\s'"#]*""")
URL_USER = re.compile(r"""(://)[^/\s@'"]+(?=@)""")
"""Regular expression for user and password in a URL; group 1 is what stands before them. URL_QUERY is the same for a
URL's query."""
NAME = rf"(?<![\w.-])(?!(?-i:(?:[\w.-]*\.)?(?:{'|'.join(HARMLESS_NAMES)}))(?![\w.-]))([\w.-]*{SECRET_WORD})"
QUOTED = r"""[\[({]*+(?:"[^"]*"?|'[^']*'?)"""
ASSIGNMENT = re.compile(
    rf"""{NAME}(?:(?:=|\s+=\s+)(?:{QUOTED}|[^\s'"]*)|["']?:\s*+(?:{QUOTED}|[^'"]+))""", re.IGNORECASE
)
"""Regular expression for `NAME=VALUE` and `NAME: VALUE` in a text (shell variables, headers), where NAME is a secret's;
group 1 is NAME."""
FLAG = re.compile(rf"(?=-){NAME}\s+(?:{QUOTED}|\S+)", re.IGNORECASE)
"""Regular expression for `--NAME VALUE` in a text, where NAME is a secret's; group 1 is `--NAME`."""


def is_secret(name: str) -> bool:
    """Whether an option of that name holds a secret: it is called a key, token, password or the like."""
    return SECRET_NAME.search(name) is not None and name.rpartition(".")[2] not in HARMLESS_NAMES


def masked(value: Any, name: str = "") -> Any:
    """Copy the configuration value of the key `name` with MASK in place of secrets: all texts if the key is named like
    a secret; in other texts user and query of URLs, and values of arguments and variables named like secrets."""
    hidden = is_secret(name)
    if isinstance(value, Mapping):
        return {key: masked(inner, name if hidden else str(key)) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        flags = ["", *(str(word) for word in value)]
        return [masked(word, name if hidden else flag_name(flag)) for word, flag in zip(value, flags, strict=False)]
    if not isinstance(value, str) or not value:
        return value
    if hidden:
        return MASK
    for pattern, shown in ((URL_QUERY, ""), (URL_USER, ""), (ASSIGNMENT, " "), (FLAG, " ")):
        value = pattern.sub(rf"\1{shown}{MASK}", value)
    return value


def flag_name(word: str) -> str:
    """Name of the command-line flag `word` if the next word is its value; empty if `word` is not such a flag."""
    return word.lstrip("-") if word.startswith("-") and "=" not in word else ""


# --- numbers in an answer ---------------------------------------------------------------------------------------------

ANSWER_MARK = "####"
AROUND = r"[ \t$€£*\\]*+"
"""Regular expression for what may surround a number: spaces, currency signs and the asterisks of bold text."""
DIGITS = r"(?>[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)"
LEADING_NUMBER = re.compile(rf"{AROUND}([-+−]?){AROUND}({DIGITS})(?![ \t]*+[/^][ \t]*+[0-9])")
ANY_NUMBER = re.compile(rf"([-−]?)({DIGITS})")


def final_number(text: str) -> str | None:
    """The number in `text` after the last `####` that a number follows, written like `-1080.5`; None without such a
    number."""
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


def first_line(error: Exception) -> str:
    """First line of an error's text and, if it ends with a colon, the next line; at most 200 characters."""
    first, _, others = (str(error).strip() or type(error).__name__).partition("\n")
    return (f"{first} {others.strip().splitlines()[0]}" if first.endswith(":") and others else first)[:200]
