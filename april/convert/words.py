"""Tokens of a shell script: words as they are written, grouped by the shell's quoting, before any expansion."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
COMMENT = re.compile(r"#[^\n]*")
OPERATOR = re.compile(r";;|&&|\|\||[;&|()\n]")
REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>|<)(&[\d-]+)?")
HERE_DOCUMENT = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)(\w+)\2")
CLOSING = {"$(": ")", "(": ")", "${": "}", '"': '"'}


@dataclass(frozen=True)
class Token:
    """A word as it is written, an operator such as `&&`, or an array assignment with the words in its brackets."""

    text: str
    line: int
    operator: bool = False
    array: tuple[str, ...] | None = field(default=None, compare=False)


def tokenize(text: str) -> Iterator[Token]:
    """The tokens of a script, in order, without comments, redirections and here-documents."""
    position, delimiters = 0, []
    while position < len(text):
        line = text.count("\n", 0, position) + 1
        if blank := BLANK.match(text, position) or COMMENT.match(text, position):
            position = blank.end()
        elif document := HERE_DOCUMENT.match(text, position):
            delimiters.append(document[3])
            position = document.end()
        elif redirection := REDIRECTION.match(text, position):
            position = redirection.end()
            if not redirection[1]:
                _, position = read_word(text, blank.end() if (blank := BLANK.match(text, position)) else position)
        elif operator := OPERATOR.match(text, position):
            yield Token(operator[0], line, operator=True)
            position = operator.end()
            if operator[0] == "\n" and delimiters:
                position, delimiters = skip_here_documents(text, position, delimiters), []
        elif array := ARRAY.match(text, position):
            inner, position = read_array(text, array.end())
            yield Token(array[0][:-1], line, array=tuple(inner))
        else:
            word, position = read_word(text, position)
            yield Token(word, line)


def read_word(text: str, position: int) -> tuple[str, int]:
    """(word at `position`, position after it); the word is never empty while text is left."""
    start = position
    while position < len(text) and text[position] not in " \t\r\n;&|()<>":
        position = end_of_part(text, position)
    return text[start : max(position, start + 1)], max(position, start + 1)


def read_array(text: str, position: int) -> tuple[list[str], int]:
    """(words of an array, position after its closing bracket)."""
    words: list[str] = []
    while position < len(text) and text[position] != ")":
        if blank := BLANK.match(text, position) or COMMENT.match(text, position):
            position = blank.end()
        elif text[position] == "\n":
            position += 1
        else:
            word, position = read_word(text, position)
            words.append(word)
    return words, position + 1


def skip_here_documents(text: str, position: int, delimiters: list[str]) -> int:
    """The position after the here-documents that start at `position`."""
    for delimiter in delimiters:
        closing = re.compile(rf"^\t*{delimiter}[ \t]*$", re.MULTILINE).search(text, position)
        position = closing.end() if closing else len(text)
    return position


def end_of_part(text: str, position: int) -> int:
    """The end of the part at `position`: an escape, a quoted text, a substitution, or one character."""
    if text[position] == "\\":
        return position + 2
    if text[position] in "'`":
        return 1 + (closing if (closing := text.find(text[position], position + 1)) >= 0 else len(text))
    opening = next((opening for opening in ("$(", "${", '"') if text.startswith(opening, position)), "")
    return end_of_nesting(text, position + len(opening), opening) if opening else position + 1


def end_of_nesting(text: str, position: int, opening: str) -> int:
    """The end of a quotation or substitution that `opening` has opened; parts in between may be nested."""
    while position < len(text) and text[position] != CLOSING[opening]:
        if opening == '"' and text[position] == "'":
            position += 1
        elif text[position] == "(" and opening in ("$(", "("):
            position = end_of_nesting(text, position + 1, "(")
        else:
            position = end_of_part(text, position)
    return position + 1
