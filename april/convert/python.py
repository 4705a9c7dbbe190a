"""Read the options of a Python script from its syntax tree, without running it.

A value is read if it is a literal, a name that is assigned one literal in the whole script, or a function's name.
"""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from april.convert.options import Options
from april.errors import ConfigError


def python_options(text: str, path: Path, configs: Collection[str], trainers: Collection[str]) -> Options:
    """The keyword arguments of the script's one call of a class in `configs`, and of those in `trainers`; the options'
    `kind` is the class. Raises ConfigError."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} is not Python ({error}); give a whole script") from None
    script = Reader(tree, path)
    calls = script.calls(configs)
    if len(calls) != 1:
        lines = " and ".join(str(call.lineno) for call in calls)
        raise ConfigError(
            f"lines {lines} of the script make a configuration each; leave one"
            if calls
            else f"the script calls none of {', '.join(configs)}: it takes its options from the command line; give the "
            "YAML file, or the shell script that calls it"
        )
    options = Options(kind=called_name(calls[0]))
    for call in [*script.calls(trainers), *calls]:
        for keyword in call.keywords:
            script.read_option(options, keyword.arg or "**", keyword.value)
    return options


class Reader:
    """Evaluates expressions of a script as far as they are constant."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.tree, self.path = tree, path
        self.imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for alias in node.names
        }
        self.functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.assigned_values: dict[str, list[ast.expr]] = {}
        for name, value in assignments(tree):
            self.assigned_values.setdefault(name, []).append(value)

    def calls(self, names: Collection[str]) -> list[ast.Call]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and called_name(node) in names]

    def read_option(self, options: Options, name: str, value: ast.expr) -> None:
        try:
            options.values[name] = self.read(value)
        except LookupError as why:
            options.unreadable[name] = str(why)

    def read(self, node: ast.expr) -> Any:
        """The value of an expression. Raises LookupError with the reason if it is not constant."""
        if isinstance(node, ast.List | ast.Tuple):
            return [self.read(element) for element in node.elts]
        if isinstance(node, ast.Name):
            return self.name(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise LookupError(f"line {node.lineno}: {ast.unparse(node)} is only known when it is run") from None

    def name(self, node: ast.Name) -> Any:
        """A function as MODULE:NAME, or the value of a variable that is assigned once. Raises LookupError."""
        if node.id in self.functions:
            return f"{self.path.stem}:{node.id}"
        if node.id in self.imported:
            return self.imported[node.id]
        values = self.assigned_values.get(node.id, [])
        if len(values) != 1 or isinstance(values[0], ast.Name):
            raise LookupError(f"line {node.lineno}: {node.id} is only known when it is run")
        return self.read(values[0])


def assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node.value if target is name else ast.Constant(...)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def called_name(node: ast.Call) -> str:
    """The last part of the called function's name."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
