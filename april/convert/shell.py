"""A shell script read without being run: which commands it would call with which words, as far as that can be said.

Assignments, arrays, `export`, and conditions whose words are all known are followed. What depends on anything else, a
command's output, a loop, a condition that cannot be decided, is a word that says why it was not read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from april.convert.expansion import Value, Word, expand, whole
from april.convert.words import Token, tokens

WHOLE_ARRAY = "[@]"
"""in the text of a word that stands for unknown ones of an array"""
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


class Simple(NamedTuple):
    """One command, or assignments."""

    words: list[Token]
    joined: str
    """what stands before it: `&&`, `||`, or nothing"""


class Choice(NamedTuple):
    """`if` or `case`: the first branch whose condition holds is run. A condition is a list of commands, or (word,
    patterns) of a `case`; an empty one always holds."""

    line: int
    branches: "list[Branch]"


class Loop(NamedTuple):
    """A loop or a function: nobody knows how often it is run."""

    line: int
    body: "list[Statement]"


class Group(NamedTuple):
    body: "list[Statement]"
    joined: str


Statement = Simple | Choice | Loop | Group
Branch = tuple[list[Statement] | tuple[str, list[str]], list[Statement]]


class Called(NamedTuple):
    line: int
    words: list[Word]


class Parser:
    """Tokens -> statements."""

    def __init__(self, text: str) -> None:
        self.tokens = list(tokens(text))
        self.at = 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def block(self, *ends: str) -> list[Statement]:
        """Up to one of the words `ends`, which is taken too; or to the end of the script."""
        found: list[Statement] = []
        joined = ""
        while token := self.peek():
            if token.text in ends and token.array is None:
                self.take()
                return found
            if token.operator and token.text != "(":
                joined = self.take().text
                continue
            found.append(self.statement(joined if joined in ("&&", "||") else ""))
            joined = ""
        return found

    def statement(self, joined: str) -> Statement:
        token = self.take()
        if token.text == "if":
            return self.conditions(token.line)
        if token.text == "case":
            return self.cases(token.line)
        if token.text in ("for", "while", "until", "select"):
            self.block("do")
            return Loop(token.line, self.block("done"))
        if token.text in ("{", "("):
            return Group(self.block("}" if token.text == "{" else ")"), joined)
        words = [token]
        while (after := self.peek()) and not after.operator:
            words.append(self.take())
        if after and after.text == "(" and len(words) == 1:
            self.take()
            self.block(")")
            self.skip_lines()
            return Loop(words[0].line, [self.statement("")] if self.peek() else [])
        return Simple(words, joined)

    def skip_lines(self) -> None:
        while (token := self.peek()) and token.text == "\n":
            self.take()

    def conditions(self, line: int) -> Choice:
        branches: list[Branch] = []
        word = "if"
        while word in ("if", "elif"):
            condition = self.block("then")
            branches.append((condition, self.block("elif", "else", "fi")))
            word = self.tokens[self.at - 1].text
        if word == "else":
            branches.append(([], self.block("fi")))
        return Choice(line, branches)

    def cases(self, line: int) -> Choice:
        asked = self.take().text
        self.block("in")
        branches: list[Branch] = []
        self.skip_lines()
        while (token := self.peek()) and token.text != "esac":
            patterns = []
            while (token := self.peek()) and self.take().text != ")":
                patterns += [token.text] if not token.operator else []
            branches.append(((asked, patterns), self.block(";;", "esac")))
            if self.tokens[self.at - 1].text == "esac":
                return Choice(line, branches)
            self.skip_lines()
        self.at += 1
        return Choice(line, branches)


@dataclass
class Script:
    """What a script has called once it was read. `environment`: variables that it may find set."""

    variables: dict[str, Value]
    called: list[Called] = field(default_factory=list)

    @classmethod
    def read(cls, text: str, environment: Mapping[str, str]) -> "Script":
        script = cls({name: Word(value) for name, value in environment.items()})
        script.run(Parser(text).block())
        return script

    def run(self, statements: Iterable[Statement]) -> None:
        for statement in statements:
            if isinstance(statement, Group) and not statement.joined:
                self.run(statement.body)
            elif isinstance(statement, Choice):
                self.choose(statement)
            elif isinstance(statement, Simple) and not (statement.joined and assigned([statement])):
                self.call(statement)
            else:
                for one in simple([statement]):
                    self.leave_open([one], f"line {one.words[0].line} sets it under a condition or in a loop")

    def call(self, statement: Simple) -> None:
        words = list(statement.words)
        setting = words and words[0].text in SETTERS and words[0].array is None
        for token in list(words):
            if not setting and not is_assignment(token):
                break
            words.pop(0)
            if is_assignment(token) and (setting or not words or all(map(is_assignment, words))):
                self.assign(token)
        if words:
            said = [word for token in words for word in self.written(token)]
            self.called.append(Called(words[0].line, said))

    def written(self, token: Token) -> list[Word]:
        return expand(token.text, self.variables)

    def assign(self, token: Token) -> None:
        found = ASSIGNMENT.fullmatch(token.text)
        assert found
        name, more, text = found.groups()
        before = self.variables.get(name)
        if token.array is not None:
            value = [word for one in token.array for word in expand(one, self.variables)]
            self.variables[name] = [*before, *value] if more and isinstance(before, list) else value
        elif more and isinstance(before, Word):
            said = whole(text, self.variables)
            self.variables[name] = Word(before.text + said.text, before.unread or said.unread)
        else:
            self.variables[name] = whole(text, self.variables)

    def choose(self, choice: Choice) -> None:
        for index, (condition, body) in enumerate(choice.branches):
            holds = self.matches(*condition) if isinstance(condition, tuple) else self.holds(condition)
            if holds is None:
                why = f"line {choice.line} has a condition that cannot be decided"
                for _, possible in choice.branches[index:]:
                    self.leave_open(possible, why)
                return
            if holds:
                self.run(body)
                return

    def leave_open(self, statements: list[Statement], why: str) -> None:
        """What may be run or not: its commands count as called, what it sets is not known."""
        for statement in simple(statements):
            for token in assigned([statement]):
                name = token.text.partition("=")[0].rstrip("+")
                before = self.variables.get(name)
                if token.array is None:
                    self.variables[name] = Word(f"${{{name}}}", f"{name}: {why}")
                else:
                    kept = before if isinstance(before, list) else []
                    self.variables[name] = [*kept, Word(f"${{{name}{WHOLE_ARRAY}}}", f"{name}: {why}")]
            if not assigned([statement]):
                self.call(statement)

    def matches(self, asked: str, patterns: list[str]) -> bool | None:
        word = whole(asked, self.variables)
        if word.unread:
            return None
        return any(fnmatchcase(word.text, whole(pattern, self.variables).text) for pattern in patterns)

    def holds(self, condition: list[Statement]) -> bool | None:
        """Whether commands succeed, None if that cannot be said."""
        result: bool | None = True
        for statement in condition:
            if isinstance(statement, Group):
                one = self.holds(statement.body)
            else:
                one = self.test(statement) if isinstance(statement, Simple) else None
            joined = statement.joined if isinstance(statement, Simple | Group) else ""
            if joined == "||":
                result = True if result or one else (None if None in (result, one) else False)
            elif joined == "&&":
                result = False if result is False or one is False else (None if None in (result, one) else True)
            else:
                result = one
        return result

    def test(self, statement: Simple) -> bool | None:
        """`[ A = B ]`, `[[ A == B ]]`, `-z A`, `-n A`, `true`."""
        words = [word for token in statement.words for word in self.written(token)]
        if any(word.unread for word in words):
            return None
        said = [word.text for word in words]
        if said in (["true"], ["false"]):
            return said == ["true"]
        if said[0] not in ("[", "[[", "test"):
            return None
        said = said[1:] if said[0] == "test" else said[1:-1]
        negated = said[:1] == ["!"]
        result = compare(said[1:] if negated else said)
        return None if result is None else result != negated


def compare(said: list[str]) -> bool | None:
    if len(said) < 2 or (len(said) == 2 and said[0] in ("-z", "-n")):
        return bool(said and said[-1]) if not said or said[0] != "-z" else not (len(said) == 2 and said[1])
    if len(said) == 3 and said[1] in COMPARISONS:
        try:
            return bool(COMPARISONS[said[1]](said[0], said[2]))
        except ValueError:
            return None
    return None


def is_assignment(token: Token) -> bool:
    return token.array is not None or bool(ASSIGNMENT.fullmatch(token.text))


def assigned(statements: Iterable[Statement]) -> list[Token]:
    """The assignments in commands that are nothing else."""
    return [
        token
        for statement in simple(statements)
        if statement.words[0].text in SETTERS or all(map(is_assignment, statement.words))
        for token in statement.words
        if is_assignment(token)
    ]


def simple(statements: Iterable[Statement]) -> Iterator[Simple]:
    """All commands in them, however deep."""
    for statement in statements:
        if isinstance(statement, Simple):
            yield statement
        elif isinstance(statement, Choice):
            for _, body in statement.branches:
                yield from simple(body)
        else:
            yield from simple(statement.body)
