"""Extracts the answer of a response: after the reasoning, in a box, or after a phrase."""

import re

END_OF_THINKING = "</think>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""An escaped character, or a brace."""


def after_thinking(response: str) -> str:
    """The text after the last `</think>`; the whole response if there is none."""
    return response.rpartition(END_OF_THINKING)[2]


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{}`, whose braces may be nested and escaped; None if there is none.

    Takes linear time, however many boxes are never closed.
    """
    boxes = {opening.end() - 1 for opening in BOX.finditer(text)}
    opened: list[int] = []
    start, end = -1, -1
    for brace in BRACE.finditer(text) if boxes else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened and (position := opened.pop()) in boxes and position > start:
            start, end = position, brace.start()
    return None if start < 0 else text[start + 1 : end].strip()


def after_phrase(text: str, phrase: str) -> str | None:
    """The rest of the line after the last `phrase:`, case-insensitive; None if there is none."""
    found = re.findall(rf"(?i){phrase}\s*:\s*([^\n]+)", text)
    return found[-1].strip() if found else None
