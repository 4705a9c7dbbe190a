"""Where in a response its answer is: behind the reasoning, in a box, after a phrase."""

import re

END_OF_THINKING = "</think>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def after_thinking(response: str) -> str:
    """What follows the last `</think>`; all of a response without one."""
    return response.rpartition(END_OF_THINKING)[2]


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{}`, whose braces may be nested and escaped; None if there is none."""
    for opening in reversed(list(BOX.finditer(text))):
        content = closed(text, opening.end())
        if content is not None:
            return content.strip()
    return None


def closed(text: str, start: int) -> str | None:
    """From `start` to the brace that closes the one before it."""
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place]
        place += 1
    return None


def after_phrase(text: str, phrase: str) -> str | None:
    """The rest of the line behind the last `phrase:`, in any case; None if there is none."""
    found = re.findall(rf"(?i){phrase}\s*:\s*([^\n]+)", text)
    return found[-1].strip() if found else None
