"""Tokenisation and word expansion of a shell script: quotes removed, variables replaced, and for each word that cannot
be determined the reason."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from april.util.errors import ConfigError

# --- tokens -----------------------------------------------------------------------------------------------------------

ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
COMMENT = re.compile(r"#[^\n]*")
OPERATOR = re.compile(r";;|&&|\|\||[;&|()\n]")
REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>|<)(&[\d-]+)?")
HERE_DOCUMENT = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)(\w+)\2")
CLOSING = {"$(": ")", "(": ")", "${": "}", '"': '"'}


@dataclass(frozen=True)
class Token:
    """Token of a shell script: a word as it is written, an operator such as `&&`, or an array assignment with the words
    in its brackets."""

    text: str
    line: int
    operator: bool = False
    array: tuple[str, ...] | None = field(default=None, compare=False)


def tokenize(text: str) -> Iterator[Token]:
    """The tokens of a script, in order, without comments, redirections and here-documents."""
    position, delimiters, line, counted = 0, [], 1, 0
    while position < len(text):
        line, counted = line + text.count("\n", counted, position), position
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
    """(word at `position`, position after the word); the word is never empty before the end of the text."""
    start = position
    while position < len(text) and text[position] not in " \t\r\n;&|()<>":
        position = end_of_part(text, position)
    return text[start : max(position, start + 1)], max(position, start + 1)


def read_array(text: str, position: int) -> tuple[list[str], int]:
    """(words of an array, position after its closing bracket). `position`: that after its opening bracket."""
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
    """The position after the here-documents that start at `position`, one for each of the `delimiters`, in order; each
    ends with a line that is its delimiter."""
    for delimiter in delimiters:
        closing = re.compile(rf"^\t*{delimiter}[ \t]*$", re.MULTILINE).search(text, position)
        position = closing.end() if closing else len(text)
    return position


def end_of_part(text: str, position: int) -> int:
    """End position of the part of a word at `position`: an escape, a quoted text, a substitution, or one character."""
    if text[position] == "\\":
        return position + 2
    if text[position] in "'`":
        return 1 + (closing if (closing := text.find(text[position], position + 1)) >= 0 else len(text))
    opening = next((opening for opening in ("$(", "${", '"') if text.startswith(opening, position)), "")
    return end_of_nesting(text, position + len(opening), opening) if opening else position + 1


def end_of_nesting(text: str, position: int, opening: str) -> int:
    """Position after the mark that closes a quotation or substitution, which began with `opening`. `position`: start of
    its content, in which others may be nested."""
    while position < len(text) and text[position] != CLOSING[opening]:
        if opening == '"' and text[position] == "'":
            position += 1
        elif text[position] == "(" and opening in ("$(", "("):
            position = end_of_nesting(text, position + 1, "(")
        else:
            position = end_of_part(text, position)
    return position + 1


# --- expansion --------------------------------------------------------------------------------------------------------

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


MAX_CHARACTERS = 1 << 16
"""Maximum number of characters into which one written word may expand: variables can double each other's values."""
MAX_EXPRESSION_CHARACTERS, MAX_INTEGER, MAX_POWER = 500, 2**63 - 1, 63
"""Limits of arithmetic that is evaluated: its number of characters, absolute value and exponent; a shell computes in 64
bits."""


class Word(NamedTuple):
    """A word of the script after the shell's expansion."""

    text: str
    unreadable: str = ""
    """Reason why `text` may differ from what the shell would produce; "" if `text` is exact."""


Value = Word | list[Word]
"""Value of a shell variable (one word) or of an array (a list of words)."""


class Fields:
    """Collects the words into which the shell expands one written word. Each added part is joined to the word before
    it, until `end` closes that word."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._grows = False
        self._characters = 0

    def add(self, word: Word) -> None:
        self._characters += len(word.text) + 1
        if self._characters > MAX_CHARACTERS:
            raise ConfigError(f"a word of the script expands to more than {MAX_CHARACTERS} characters; shorten it")
        if self._grows:
            last = self.words.pop()
            word = Word(last.text + word.text, last.unreadable or word.unreadable)
        self.words.append(word)
        self._grows = True

    def end(self) -> None:
        self._grows = False


def expand(text: str, variables: Mapping[str, Value]) -> list[Word]:
    """The words into which the shell would expand `text`, one written word. `variables`: values of the script's
    variables."""
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
    """The expansion of `text` as the right side of an assignment, where the shell does not split it: always one
    word."""
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
    """The value of `part`, `$((...))` with integers."""
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: f"${name[1]}", part[3:-2])
    expanded = expand_to_word(text, variables)
    if expanded.unreadable or len(expanded.text) > MAX_EXPRESSION_CHARACTERS:
        return Word(part, expanded.unreadable or "arithmetic that is not read")
    try:
        return Word(str(integer_value(ast.parse(expanded.text.strip(), mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return Word(part, "arithmetic that is not read")


def integer_value(node: ast.expr) -> int:
    """The value of an expression of 64-bit integers. Raises ValueError for anything else, and ArithmeticError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -integer_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = integer_value(node.left), integer_value(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= MAX_POWER:
            raise ValueError(right)
        value = ARITHMETIC[type(node.op)](left, right)
    else:
        raise ValueError(type(node))
    if abs(value) > MAX_INTEGER:
        raise OverflowError(value)
    return value
