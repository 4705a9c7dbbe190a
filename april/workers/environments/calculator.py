"""A calculator as a tool: the policy writes an expression and `=`, and reads its value."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from april.data.arithmetic import units_first
from april.workers.environments.base import EnvironmentTurn, Observation

EXPRESSION = re.compile(r"[0-9+\-*/(). ]{1,200}=$")
LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
STEP = re.compile(r"(\d\d)\*(\d)\+(\d)(\d)=$")
ERROR = "error"

OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(turn: EnvironmentTurn) -> Observation:
    """Answers with the value of the expression at the end of the turn (+ - * / and brackets), or with `error`.

    The state counts `calls` and `errors`.
    """
    found = EXPRESSION.search(turn.text)
    try:
        return with_counts(turn, format_value(value_of(found[0][:-1])) if found else ERROR)
    except (SyntaxError, ArithmeticError, LookupError, RecursionError, MemoryError):
        return with_counts(turn, ERROR)


def scratchpad(turn: EnvironmentTurn) -> Observation:
    """A calculator for the quickstart's task (`april/data/arithmetic.py`): answers a turn that ends with a step like
    `12*3+54=`, of two digits, one digit and an addend of two digits, with `#` and the result modulo 100. Addend and
    result are written units digit first: this step is 12 * 3 + 45 = 81, and its answer `#18`. Any other turn is
    answered with `error`."""
    found = STEP.search(turn.text)
    if not found:
        return with_counts(turn, ERROR)
    times, digit, units, tens = map(int, found.groups())
    return with_counts(turn, "#" + units_first((times * digit + 10 * tens + units) % 100))


def with_counts(turn: EnvironmentTurn, text: str) -> Observation:
    before = turn.state or {"calls": 0, "errors": 0}
    return Observation(text, {"calls": before["calls"] + 1, "errors": before["errors"] + (text == ERROR)})


def value_of(expression: str) -> Fraction:
    return _value(ast.parse(LEADING_ZEROS.sub("", expression.strip()), mode="eval").body)


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise SyntaxError("not an expression of numbers")


def format_value(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
