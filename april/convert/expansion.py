"""What a word of a shell script stands for: its quotes taken off, its variables replaced, or why it cannot be said."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from april.convert.words import end_of

PARAMETER = re.compile(r"(\w+)(\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$])")
ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Word(NamedTuple):
    text: str
    unread: str = ""
    """why the shell would make something else of it; empty: it would not"""


Value = Word | list[Word]
"""of a variable, or of an array"""


class Fields:
    """The words that one written word becomes."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._grows = False

    def add(self, word: Word) -> None:
        if self._grows:
            last = self.words.pop()
            word = Word(last.text + word.text, last.unread or word.unread)
        self.words.append(word)
        self._grows = True

    def end(self) -> None:
        self._grows = False


def expand(written: str, variables: Mapping[str, Value]) -> list[Word]:
    """The words that `written` stands for, as the shell would have them."""
    fields, at = Fields(), 0
    if written.startswith("~/"):
        written = "${HOME}" + written[1:]
    while at < len(written):
        end = end_of(written, at)
        piece, at = written[at:end], end
        if piece[0] == "$" and (name := NAME.match(written, end - 1)):
            piece, at = name[0], name.end()
        if piece[0] == '"':
            quoted(piece[1:-1], variables, fields)
        elif piece[0] == "'":
            fields.add(Word(piece[1:-1]))
        elif piece[0] == "\\":
            fields.add(Word(piece[1:].removeprefix("\n")))
        elif piece[0] in "$`" and len(piece) > 1:
            split(stands_for(piece, variables), fields)
        else:
            fields.add(Word(piece))
    return fields.words


def whole(written: str, variables: Mapping[str, Value]) -> Word:
    """What a variable is set to: one word, however many it would be as an argument."""
    fields = Fields()
    quoted_parts = expand(f'"{written}"' if not re.search(r"['\"\\]", written) else written, variables)
    for index, word in enumerate(quoted_parts):
        fields.add(Word(" " + word.text if index else word.text, word.unread))
    return fields.words[0] if fields.words else Word("")


def quoted(text: str, variables: Mapping[str, Value], fields: Fields) -> None:
    """What stands between double quotes: variables are replaced, and stay whole."""
    at = 0
    if not text:
        fields.add(Word(""))
    while at < len(text):
        end = at + 1 if text[at] == "'" else end_of(text, at)
        piece, at = text[at:end], end
        if piece == "$" and (name := NAME.match(text, end - 1)):
            piece, at = name[0], name.end()
        if piece[0] in "$`" and len(piece) > 1:
            value = stands_for(piece, variables)
            for index, word in enumerate(value if isinstance(value, list) else [value]):
                if index:
                    fields.end()
                fields.add(word)
        elif piece[0] == "\\" and piece[1:] in ("$", "`", '"', "\\", "\n"):
            fields.add(Word(piece[1:].removeprefix("\n")))
        else:
            fields.add(Word(piece))


def split(value: Value, fields: Fields) -> None:
    """What a variable without quotes adds: words where it has blanks."""
    whole_ones = value if isinstance(value, list) else [value]
    words = [
        part for one in whole_ones for part in ([one] if one.unread else [Word(text) for text in one.text.split()])
    ]
    for index, word in enumerate(words):
        if index:
            fields.end()
        fields.add(word)


def stands_for(piece: str, variables: Mapping[str, Value]) -> Value:
    """The value of `$NAME`, `${NAME:-other}`, `${NAME[@]}` or `$((arithmetic))`."""
    if piece.startswith("$((") and piece.endswith("))"):
        return arithmetic(piece, variables)
    if piece[0] == "`" or piece.startswith("$("):
        return Word(piece, "a command would say it")
    found = PARAMETER.fullmatch(piece[2:-1] if piece[1] == "{" else piece[1:])
    if piece in ("$@", "$*", "${@}", "${*}"):
        return []
    if not found:
        return Word(piece, "an expansion that is not read")
    name, array, how, other = found.groups()
    value = variables.get(name)
    if isinstance(value, list) and not array:
        value = value[0] if value else Word("")
    empty = value is None or (how and how[0] == ":" and value == Word(""))
    if how and how[-1] == "+":
        return Word("") if empty else whole(other, variables)
    if empty and how:
        return whole(other, variables)
    if value is None:
        return Word(
            piece,
            f"{name} is not set in the script"
            + (", maybe in one that it sources" if array else f"; give it with --set {name}=VALUE"),
        )
    return value


def arithmetic(piece: str, variables: Mapping[str, Value]) -> Word:
    """Of whole numbers."""
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: f"${name[1]}", piece[3:-2])
    read = whole(text, variables)
    if read.unread:
        return Word(piece, read.unread)
    try:
        return Word(str(number(ast.parse(read.text.strip(), mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError):
        return Word(piece, "arithmetic that is not read")


def number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](number(node.left), number(node.right))
    raise ValueError(ast.dump(node))
