"""The planted faults as the `*.toml` files beside this module list them, and how one is put into a tree.

A fault names a function and an operator on a node of its syntax tree. Layout, comments and docstrings may change:

    [one-step-too-stale]
    promise = "…"                                 # sentence of the table in docs/testing.md that the fault breaks
    function = "april.broker.ledger.batches:StalenessBound._holds"    # or a class, a constant, a module
    operator = "replace"                          # or delete, true, false, negate
    node = "deadline - next_step + 1"             # stands once in the function; compared as a syntax tree
    by = "deadline - next_step + 2"               # of `replace` alone
    caught_by = "tests/…::test_…"                 # node id of the test that must fail
"""

import ast
import copy
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPERATORS = {
    "replace": "the node is replaced by the code of `by`",
    "delete": "the statements are replaced by `pass`",
    "true": "the expression is replaced by `True`",
    "false": "the expression is replaced by `False`",
    "negate": "the expression is replaced by its negation",
}
KEYS = {"promise", "function", "operator", "node", "caught_by"}


class BadMutant(ValueError):
    """A fault that cannot be planted; the message names the fault and the reason."""


@dataclass(frozen=True)
class Mutant:
    name: str
    promise: str
    function: str
    """`package.module:Qualified.name` of the function, class or constant that the fault is in; `package.module` for its
    top"""
    operator: str
    """key of `OPERATORS`"""
    node: str
    """code of the expression or the statements that the operator changes"""
    caught_by: str
    by: str = ""

    def find(self, tree: Path) -> Path:
        """The file that the fault changes. Raises BadMutant."""
        file = self._file(tree)
        self._mutated(file)
        return file

    def plant(self, tree: Path) -> Path:
        """Put the fault into a tree; returns the changed file. Raises BadMutant."""
        file = self._file(tree)
        file.write_text(self._mutated(file))
        return file

    def _file(self, tree: Path) -> Path:
        module = self.function.partition(":")[0]
        path = tree.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            raise self._bad(f"there is no module {module}")
        return file

    def _mutated(self, file: Path) -> str:
        """The text of the file with the fault in it."""
        text = file.read_text()
        scope = defined(ast.parse(text), self.function.partition(":")[2])
        if scope is None:
            raise self._bad(f"{self.function} is not defined")
        wanted = ast.parse(textwrap.dedent(self.node)).body
        as_statements = self.operator == "delete" or not (len(wanted) == 1 and isinstance(wanted[0], ast.Expr))
        found = list(runs(scope, wanted) if as_statements else expressions(scope, wanted[0].value))
        if len(found) != 1:
            raise self._bad(f"its node stands {len(found)} times in {self.function}, not once; take code that is there")
        start, end = found[0]
        return splice(text, start, end, self._replacement(as_statements, start.col_offset))

    def _replacement(self, as_statements: bool, column: int) -> str:
        code = textwrap.dedent(self.by).strip("\n")
        match self.operator:
            case "delete":
                return "pass"
            case "true" | "false":
                return self.operator.capitalize()
            case "negate":
                return f"(not ({self.node}))"
            case "replace" if as_statements:
                return textwrap.indent(code, " " * column).lstrip()
            case "replace":
                return f"({code})"
        raise self._bad(f"operator {self.operator!r} is not one of {', '.join(OPERATORS)}")

    def _bad(self, reason: str) -> BadMutant:
        return BadMutant(f"mutant {self.name}: {reason}")


# --- syntax trees -----------------------------------------------------------------------------------------------------


def defined(tree: ast.AST, qualified_name: str) -> ast.AST | None:
    """The definition or assignment with that name, the whole module for an empty name; None if there is none."""
    scope: ast.AST | None = tree
    for name in filter(None, qualified_name.split(".")):
        assigned = isinstance(scope, ast.Module | ast.ClassDef)
        scope = next((node for node in own_statements(scope) if name in names_of(node, assigned)), None)
        if scope is None:
            return None
    return scope


def own_statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Statements of a scope, inside its branches as well, but not inside its functions and classes."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from own_statements(node)


def names_of(node: ast.AST, assigned: bool) -> set[str]:
    """Names that a statement defines, or that it assigns if `assigned`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if not assigned:
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def expressions(scope: ast.AST, wanted: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(first, last) node of each expression of a scope that equals `wanted`."""
    shape = shape_of(wanted)
    for node in ast.walk(scope):
        if isinstance(node, ast.expr) and type(node) is type(wanted) and shape_of(node) == shape:
            yield node, node


def runs(scope: ast.AST, wanted: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """(first, last) statement of each run of statements of a scope that equals `wanted`."""
    shapes = [shape_of(node) for node in wanted]
    for node in [ast.Module([scope], []), *ast.walk(scope)]:
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for first in range(len(body) - len(wanted) + 1):
                    run = body[first : first + len(wanted)]
                    if [shape_of(statement) for statement in run] == shapes:
                        yield run[0], run[-1]


def shape_of(node: ast.AST) -> str:
    """A node without positions and docstrings, and without whether its names are read or written."""
    dumped = ast.dump(WithoutDocstrings().visit(copy.deepcopy(node)))
    return dumped.replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


class WithoutDocstrings(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef


def splice(text: str, first: ast.AST, last: ast.AST, code: str) -> str:
    """A source text in which the nodes from `first` to `last` are replaced."""
    lines = text.splitlines(keepends=True)
    start = sum(map(len, lines[: first.lineno - 1])) + characters(lines[first.lineno - 1], first.col_offset)
    end = sum(map(len, lines[: last.end_lineno - 1])) + characters(lines[last.end_lineno - 1], last.end_col_offset)
    return text[:start] + code + text[end:]


def characters(line: str, column: int) -> int:
    """Characters before a column that counts bytes of UTF-8."""
    return len(line.encode()[:column].decode())


def load(folder: Path = Path(__file__).parent) -> dict[str, Mutant]:
    """All planted faults by name. Raises BadMutant."""
    mutants: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            if name in mutants:
                raise BadMutant(f"mutant {name} of {path.name} is named twice; give it another name")
            needed = KEYS | ({"by"} if fields.get("operator") == "replace" else set())
            if set(fields) != needed:
                raise BadMutant(
                    f"mutant {name} of {path.name} has the keys {sorted(fields)}; it needs {sorted(needed)}"
                )
            mutants[name] = Mutant(name, **fields)
    return mutants
