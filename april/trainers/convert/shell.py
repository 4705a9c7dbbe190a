"""Read a shell script without running it: the commands that it would call, and their expanded words.

Assignments, arrays, `export`, and conditions with known words are followed. Words that depend on a command's output, a
loop or an undecidable condition say why they are unknown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from april.trainers.convert.expansion import Token, Value, Word, expand, expand_to_word, tokenize
from april.util.errors import ConfigError

MAX_WORDS = 100_000
"""Maximum number of expanded words of all commands of a script."""
UNKNOWN_ELEMENTS = "[@]"
"""Suffix of a word's text that marks the word as standing for unknown elements of an array."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
SETTERS = ("export", "declare", "local", "readonly", "typeset")
COMPARISONS = {
    "=": lambda a, b: a == b,
    "==": fnmatchcase,
    "!=": lambda a, b: not fnmatchcase(a, b),
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
}


class SimpleCommand(NamedTuple):
    """One command of the script with the assignments before it, or assignments without a command."""

    words: list[Token]
    connector: str
    """Operator that connects the command to the previous one: `&&`, `||`, or ""."""


class Conditional(NamedTuple):
    """`if` or `case`: the first branch whose condition is true is run. A condition is a list of commands, or (word,
    patterns) of a `case`. An empty condition, as of `else`, is always true."""

    line: int
    branches: "list[Branch]"


class Loop(NamedTuple):
    """A loop or a function definition: statements that run an unknown number of times."""

    line: int
    body: "list[Statement]"


class CommandGroup(NamedTuple):
    """Statements grouped in braces or parentheses."""

    body: "list[Statement]"
    connector: str


Statement = SimpleCommand | Conditional | Loop | CommandGroup
Branch = tuple[list[Statement] | tuple[str, list[str]], list[Statement]]


class Invocation(NamedTuple):
    """A command that the script calls, with its expanded words."""

    line: int
    words: list[Word]


class ShellParser:
    """Parser from tokens to statements: commands, conditions, loops and groups."""

    def __init__(self, text: str) -> None:
        self.tokens = list(tokenize(text))
        self.position = 0

    def peek(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> Token:
        self.position += 1
        return self.tokens[self.position - 1]

    def block(self, *ends: str) -> list[Statement]:
        """Parse statements up to and including one of the words `ends`, or to the end of the script."""
        statements: list[Statement] = []
        connector = ""
        while token := self.peek():
            if token.text in ends and token.array is None:
                self.take()
                return statements
            if token.operator and token.text != "(":
                connector = self.take().text
                continue
            statements.append(self.statement(connector if connector in ("&&", "||") else ""))
            connector = ""
        return statements

    def statement(self, connector: str) -> Statement:
        token = self.take()
        if token.text == "if":
            return self.conditions(token.line)
        if token.text == "case":
            return self.cases(token.line)
        if token.text in ("for", "while", "until", "select"):
            self.block("do")
            return Loop(token.line, self.block("done"))
        if token.text in ("{", "("):
            return CommandGroup(self.block("}" if token.text == "{" else ")"), connector)
        words = [token]
        while (following := self.peek()) and not following.operator:
            words.append(self.take())
        if following and following.text == "(" and len(words) == 1:
            self.take()
            self.block(")")
            self.skip_lines()
            return Loop(words[0].line, [self.statement("")] if self.peek() else [])
        return SimpleCommand(words, connector)

    def skip_lines(self) -> None:
        while (token := self.peek()) and token.text == "\n":
            self.take()

    def conditions(self, line: int) -> Conditional:
        branches: list[Branch] = []
        word = "if"
        while word in ("if", "elif"):
            condition = self.block("then")
            branches.append((condition, self.block("elif", "else", "fi")))
            word = self.tokens[self.position - 1].text
        if word == "else":
            branches.append(([], self.block("fi")))
        return Conditional(line, branches)

    def cases(self, line: int) -> Conditional:
        subject = self.take().text
        self.block("in")
        branches: list[Branch] = []
        self.skip_lines()
        while (token := self.peek()) and token.text != "esac":
            patterns = []
            while (token := self.peek()) and self.take().text != ")":
                patterns += [token.text] if not token.operator else []
            branches.append(((subject, patterns), self.block(";;", "esac")))
            if self.tokens[self.position - 1].text == "esac":
                return Conditional(line, branches)
            self.skip_lines()
        self.position += 1
        return Conditional(line, branches)


@dataclass
class Script:
    """State while a script is read: the values of its variables and the commands that it calls."""

    variables: dict[str, Value]
    invocations: list[Invocation] = field(default_factory=list)
    words: int = 0
    """Number of words of commands that have been expanded so far (at most `MAX_WORDS`)."""

    @classmethod
    def read(cls, text: str, environment: Mapping[str, str]) -> "Script":
        script = cls({name: Word(value) for name, value in environment.items()})
        script.run(ShellParser(text).block())
        return script

    def run(self, statements: Iterable[Statement]) -> None:
        for statement in statements:
            if isinstance(statement, CommandGroup) and not statement.connector:
                self.run(statement.body)
            elif isinstance(statement, Conditional):
                self.run_conditional(statement)
            elif isinstance(statement, SimpleCommand) and not (statement.connector and assignments([statement])):
                self.call(statement)
            else:
                for command in simple_commands([statement]):
                    self.mark_undecided(
                        [command], f"line {command.words[0].line} sets it under a condition or in a loop"
                    )

    def call(self, statement: SimpleCommand) -> None:
        words = list(statement.words)
        setting = words and words[0].text in SETTERS and words[0].array is None
        for token in list(words):
            if not setting and not is_assignment(token):
                break
            words.pop(0)
            if is_assignment(token) and (setting or not words or all(map(is_assignment, words))):
                self.assign(token)
        if words:
            expanded = [word for token in words for word in self.expand(token)]
            self.invocations.append(Invocation(words[0].line, expanded))

    def expand(self, token: Token) -> list[Word]:
        words = expand(token.text, self.variables)
        self.words += len(words)
        if self.words > MAX_WORDS:
            raise ConfigError(
                f"line {token.line}: the script's commands expand to more than {MAX_WORDS} words; shorten it"
            )
        return words

    def assign(self, token: Token) -> None:
        match = ASSIGNMENT.fullmatch(token.text)
        assert match
        name, appends, text = match.groups()
        before = self.variables.get(name)
        if token.array is not None:
            value = [word for element in token.array for word in self.expand(Token(element, token.line))]
            self.variables[name] = [*before, *value] if appends and isinstance(before, list) else value
        elif appends and isinstance(before, Word):
            addition = expand_to_word(text, self.variables)
            self.variables[name] = Word(before.text + addition.text, before.unreadable or addition.unreadable)
        else:
            self.variables[name] = expand_to_word(text, self.variables)

    def run_conditional(self, conditional: Conditional) -> None:
        for index, (condition, body) in enumerate(conditional.branches):
            result = self.matches(*condition) if isinstance(condition, tuple) else self.evaluate(condition)
            if result is None:
                why = f"line {conditional.line} has a condition that cannot be decided"
                for _, possible in conditional.branches[index:]:
                    self.mark_undecided(possible, why)
                return
            if result:
                self.run(body)
                return

    def mark_undecided(self, statements: list[Statement], why: str) -> None:
        """Handle statements of which it is not known whether the shell would run them: their commands count as called,
        and the variables that they assign become unknown, with the reason `why`."""
        for statement in simple_commands(statements):
            for token in assignments([statement]):
                name = token.text.partition("=")[0].rstrip("+")
                before = self.variables.get(name)
                if token.array is None:
                    self.variables[name] = Word(f"${{{name}}}", f"{name}: {why}")
                else:
                    known = before if isinstance(before, list) else []
                    self.variables[name] = [*known, Word(f"${{{name}{UNKNOWN_ELEMENTS}}}", f"{name}: {why}")]
            if not assignments([statement]):
                self.call(statement)

    def matches(self, subject: str, patterns: list[str]) -> bool | None:
        word = expand_to_word(subject, self.variables)
        if word.unreadable:
            return None
        return any(fnmatchcase(word.text, expand_to_word(pattern, self.variables).text) for pattern in patterns)

    def evaluate(self, condition: list[Statement]) -> bool | None:
        """Whether the commands of a condition succeed; None if that is unknown."""
        result: bool | None = True
        for statement in condition:
            if isinstance(statement, CommandGroup):
                succeeds = self.evaluate(statement.body)
            else:
                succeeds = self.test(statement) if isinstance(statement, SimpleCommand) else None
            connector = statement.connector if isinstance(statement, SimpleCommand | CommandGroup) else ""
            if connector == "||":
                result = True if result or succeeds else (None if None in (result, succeeds) else False)
            elif connector == "&&":
                result = (
                    False if result is False or succeeds is False else (None if None in (result, succeeds) else True)
                )
            else:
                result = succeeds
        return result

    def test(self, statement: SimpleCommand) -> bool | None:
        """The result of `[ A = B ]`, `[[ A == B ]]`, `-z A`, `-n A`, `true` or `false`; None if it is unknown."""
        words = [word for token in statement.words for word in self.expand(token)]
        if any(word.unreadable for word in words):
            return None
        texts = [word.text for word in words]
        if texts in (["true"], ["false"]):
            return texts == ["true"]
        if texts[0] not in ("[", "[[", "test"):
            return None
        texts = texts[1:] if texts[0] == "test" else texts[1:-1]
        negated = texts[:1] == ["!"]
        result = compare(texts[1:] if negated else texts)
        return None if result is None else result != negated


def compare(texts: list[str]) -> bool | None:
    if len(texts) < 2 or (len(texts) == 2 and texts[0] in ("-z", "-n")):
        return bool(texts and texts[-1]) if not texts or texts[0] != "-z" else not (len(texts) == 2 and texts[1])
    if len(texts) == 3 and texts[1] in COMPARISONS:
        try:
            return bool(COMPARISONS[texts[1]](texts[0], texts[2]))
        except ValueError:
            return None
    return None


def is_assignment(token: Token) -> bool:
    return token.array is not None or bool(ASSIGNMENT.fullmatch(token.text))


def assignments(statements: Iterable[Statement]) -> list[Token]:
    """The assignments made by those commands that do nothing but set variables (plain assignments, `export` and the
    like)."""
    return [
        token
        for statement in simple_commands(statements)
        if statement.words[0].text in SETTERS or all(map(is_assignment, statement.words))
        for token in statement.words
        if is_assignment(token)
    ]


def simple_commands(statements: Iterable[Statement]) -> Iterator[SimpleCommand]:
    """All commands in the statements, nested ones included."""
    for statement in statements:
        if isinstance(statement, SimpleCommand):
            yield statement
        elif isinstance(statement, Conditional):
            for _, body in statement.branches:
                yield from simple_commands(body)
        else:
            yield from simple_commands(statement.body)
