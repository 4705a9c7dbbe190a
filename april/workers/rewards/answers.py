"""Where in a response its answer is: behind the reasoning, in a box, after a phrase."""

import re

END_OF_THINKING = "</think>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""an escaped character, or a brace"""


def after_thinking(response: str) -> str:
    """What follows the last `</think>`; all of a response without one."""
    return response.rpartition(END_OF_THINKING)[2]


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{}`, whose braces may be nested and escaped; None if there is none.

    One pass over the braces, however many boxes are never closed.
    """
    boxes = {opening.end() - 1 for opening in BOX.finditer(text)}
    opened: list[int] = []
    start, end = -1, -1
    for brace in BRACE.finditer(text) if boxes else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened and (place := opened.pop()) in boxes and place > start:
            start, end = place, brace.start()
    return None if start < 0 else text[start + 1 : end].strip()


def after_phrase(text: str, phrase: str) -> str | None:
    """The rest of the line behind the last `phrase:`, in any case; None if there is none."""
    found = re.findall(rf"(?i){phrase}\s*:\s*([^\n]+)", text)
    return found[-1].strip() if found else None
