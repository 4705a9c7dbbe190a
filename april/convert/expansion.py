"""Shell expansion of words: remove quotes and replace variables, or say why the result is unknown."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from april.convert.words import end_of_part

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
    """An expanded word."""

    text: str
    unreadable: str = ""
    """Why `text` is not what the shell would produce; "" if it is."""


Value = Word | list[Word]
"""The value of a variable or of an array."""


class Fields:
    """Collects the words into which one written word expands; consecutive parts are joined until `end`."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._grows = False

    def add(self, word: Word) -> None:
        if self._grows:
            last = self.words.pop()
            word = Word(last.text + word.text, last.unreadable or word.unreadable)
        self.words.append(word)
        self._grows = True

    def end(self) -> None:
        self._grows = False


def expand(text: str, variables: Mapping[str, Value]) -> list[Word]:
    """The words into which the shell would expand `text`."""
    fields, position = Fields(), 0
    if text.startswith("~/"):
        text = "${HOME}" + text[1:]
    while position < len(text):
        end = end_of_part(text, position)
        part, position = text[position:end], end
        if part[0] == "$" and (name := NAME.match(text, end - 1)):
            part, position = name[0], name.end()
        if part[0] == '"':
            add_quoted(part[1:-1], variables, fields)
        elif part[0] == "'":
            fields.add(Word(part[1:-1]))
        elif part[0] == "\\":
            fields.add(Word(part[1:].removeprefix("\n")))
        elif part[0] in "$`" and len(part) > 1:
            add_split(expand_part(part, variables), fields)
        else:
            fields.add(Word(part))
    return fields.words


def expand_to_word(text: str, variables: Mapping[str, Value]) -> Word:
    """The expansion of an assignment's right side, which is always one word."""
    fields = Fields()
    quoted_parts = expand(f'"{text}"' if not re.search(r"['\"\\]", text) else text, variables)
    for index, word in enumerate(quoted_parts):
        fields.add(Word(" " + word.text if index else word.text, word.unreadable))
    return fields.words[0] if fields.words else Word("")


def add_quoted(text: str, variables: Mapping[str, Value], fields: Fields) -> None:
    """Add the text between double quotes: variables are replaced, and not split at blanks."""
    position = 0
    if not text:
        fields.add(Word(""))
    while position < len(text):
        end = position + 1 if text[position] == "'" else end_of_part(text, position)
        part, position = text[position:end], end
        if part == "$" and (name := NAME.match(text, end - 1)):
            part, position = name[0], name.end()
        if part[0] in "$`" and len(part) > 1:
            value = expand_part(part, variables)
            for index, word in enumerate(value if isinstance(value, list) else [value]):
                if index:
                    fields.end()
                fields.add(word)
        elif part[0] == "\\" and part[1:] in ("$", "`", '"', "\\", "\n"):
            fields.add(Word(part[1:].removeprefix("\n")))
        else:
            fields.add(Word(part))


def add_split(value: Value, fields: Fields) -> None:
    """Add the value of an unquoted variable, split at blanks."""
    values = value if isinstance(value, list) else [value]
    words = [
        part
        for value in values
        for part in ([value] if value.unreadable else [Word(text) for text in value.text.split()])
    ]
    for index, word in enumerate(words):
        if index:
            fields.end()
        fields.add(word)


def expand_part(part: str, variables: Mapping[str, Value]) -> Value:
    """The value of `$NAME`, `${NAME:-other}`, `${NAME[@]}` or `$((arithmetic))`."""
    if part.startswith("$((") and part.endswith("))"):
        return arithmetic(part, variables)
    if part[0] == "`" or part.startswith("$("):
        return Word(part, "a command would say it")
    match = PARAMETER.fullmatch(part[2:-1] if part[1] == "{" else part[1:])
    if part in ("$@", "$*", "${@}", "${*}"):
        return []
    if not match:
        return Word(part, "an expansion that is not read")
    name, array, operator_, other = match.groups()
    value = variables.get(name)
    if isinstance(value, list) and not array:
        value = value[0] if value else Word("")
    empty = value is None or (operator_ and operator_[0] == ":" and value == Word(""))
    if operator_ and operator_[-1] == "+":
        return Word("") if empty else expand_to_word(other, variables)
    if empty and operator_:
        return expand_to_word(other, variables)
    if value is None:
        return Word(
            part,
            f"{name} is not set in the script"
            + (", maybe in one that it sources" if array else f"; give it with --set {name}=VALUE"),
        )
    return value


def arithmetic(part: str, variables: Mapping[str, Value]) -> Word:
    """The value of `$((...))` with integers."""
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: f"${name[1]}", part[3:-2])
    expanded = expand_to_word(text, variables)
    if expanded.unreadable:
        return Word(part, expanded.unreadable)
    try:
        return Word(str(number(ast.parse(expanded.text.strip(), mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError):
        return Word(part, "arithmetic that is not read")


def number(node: ast.expr) -> int:
    """The value of an integer expression. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](number(node.left), number(node.right))
    raise ValueError(ast.dump(node))
