"""The words of a shell script: what belongs together by the shell's quotes, before anything is expanded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
COMMENT = re.compile(r"#[^\n]*")
OPERATOR = re.compile(r";;|&&|\|\||[;&|()\n]")
REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>|<)(&[\d-]+)?")
HERE = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)(\w+)\2")
CLOSING = {"$(": ")", "(": ")", "${": "}", '"': '"'}


@dataclass(frozen=True)
class Token:
    """A word as it is written; an operator such as `&&`; or an array's name with the words in its brackets."""

    text: str
    line: int
    operator: bool = False
    array: tuple[str, ...] | None = field(default=None, compare=False)


def tokens(text: str) -> Iterator[Token]:
    """Of a script, in order. Comments, redirections and the lines of here-documents are left out."""
    at, ends = 0, []
    while at < len(text):
        line = text.count("\n", 0, at) + 1
        if blank := BLANK.match(text, at) or COMMENT.match(text, at):
            at = blank.end()
        elif here := HERE.match(text, at):
            ends.append(here[3])
            at = here.end()
        elif redirection := REDIRECTION.match(text, at):
            at = redirection.end()
            if not redirection[1]:
                _, at = word(text, blank.end() if (blank := BLANK.match(text, at)) else at)
        elif operator := OPERATOR.match(text, at):
            yield Token(operator[0], line, operator=True)
            at = operator.end()
            if operator[0] == "\n" and ends:
                at, ends = behind_documents(text, at, ends), []
        elif array := ARRAY.match(text, at):
            inner, at = array_words(text, array.end())
            yield Token(array[0][:-1], line, array=tuple(inner))
        else:
            written, at = word(text, at)
            yield Token(written, line)


def word(text: str, at: int) -> tuple[str, int]:
    """(the word that begins at `at`, where it ends); never empty where there is text left."""
    start = at
    while at < len(text) and text[at] not in " \t\r\n;&|()<>":
        at = end_of(text, at)
    return text[start : max(at, start + 1)], max(at, start + 1)


def array_words(text: str, at: int) -> tuple[list[str], int]:
    """(words, where what follows the closing bracket begins)."""
    words: list[str] = []
    while at < len(text) and text[at] != ")":
        if blank := BLANK.match(text, at) or COMMENT.match(text, at):
            at = blank.end()
        elif text[at] == "\n":
            at += 1
        else:
            written, at = word(text, at)
            words.append(written)
    return words, at + 1


def behind_documents(text: str, at: int, ends: list[str]) -> int:
    """Where the script goes on behind its here-documents, whose lines begin at `at`."""
    for end in ends:
        closing = re.compile(rf"^\t*{end}[ \t]*$", re.MULTILINE).search(text, at)
        at = closing.end() if closing else len(text)
    return at


def end_of(text: str, at: int) -> int:
    """Where the piece ends that begins at `at`: an escape, a quoted text, a substitution, or one letter."""
    if text[at] == "\\":
        return at + 2
    if text[at] in "'`":
        return 1 + (closing if (closing := text.find(text[at], at + 1)) >= 0 else len(text))
    opening = next((opening for opening in ("$(", "${", '"') if text.startswith(opening, at)), "")
    return behind(text, at + len(opening), opening) if opening else at + 1


def behind(text: str, at: int, opening: str) -> int:
    """Where what was opened ends; what lies in between may be opened and closed itself."""
    while at < len(text) and text[at] != CLOSING[opening]:
        if opening == '"' and text[at] == "'":
            at += 1
        elif text[at] == "(" and opening in ("$(", "("):
            at = behind(text, at + 1, "(")
        else:
            at = end_of(text, at)
    return at + 1
