"""Every promise of docs/testing.md has a test that is there, and every planted fault a promise that it breaks."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants.catalogue import BadMutant, Mutant, load

ROOT = Path(__file__).parents[1]
MUTANTS = load()


class Row(NamedTuple):
    promise: str
    tests: list[str]
    mutants: list[str]


def rows():
    promises = (ROOT / "docs" / "testing.md").read_text().partition("## Promises")[2]
    for line in promises.splitlines():
        if line.startswith("| ") and not line.startswith("| promise |"):
            promise, tests, mutants = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(promise, re.findall(r"`(tests/[^`]+)`", tests), [name for name in mutants.split(", ") if name])


ROWS = list(rows())


@cache
def defined_in(path):
    """What a file defines: functions, classes and their methods, and what it gives a name at its top."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def is_there(test):
    path, _, name = test.partition("::")
    return (ROOT / path).is_file() and name.partition("[")[0] in defined_in(path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.promise)
def test_a_promise_has_tests_that_are_there(row):
    assert row.tests, "no test is named"
    assert [test for test in row.tests if not is_there(test)] == []
    assert [name for name in row.mutants if name not in MUTANTS] == []


def test_there_are_promises_and_each_is_made_once():
    promises = [row.promise for row in ROWS]
    assert len(promises) > 100 and sorted(promises) == sorted(set(promises))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted_and_breaks_a_promise(mutant):
    mutant.find(ROOT)
    assert mutant.by != mutant.node and is_there(mutant.caught_by)
    (row,) = [row for row in ROWS if row.promise == mutant.promise]
    assert mutant.name in row.mutants
    assert mutant.caught_by.partition("[")[0] in row.tests


SOURCE = """
LIMIT = 8


class Queue:
    def push(self, a, b):
        \"\"\"Docstrings, comments and layout do not matter.\"\"\"
        if (a  <  b):   # here
            self.count += 1
        return a

    def pop(self, a, b):
        return a < b or a < b
"""


@pytest.fixture
def planted(tmp_path):
    """planted(...) -> the module `april.module` with a fault planted in it."""
    (tmp_path / "april").mkdir()

    def plant(function, operator, node, by=""):
        (tmp_path / "april" / "module.py").write_text(SOURCE)
        mutant = Mutant("off-by-one", "", f"april.module{function}", operator, node, "", by)
        return mutant.plant(tmp_path).read_text()

    return plant


@pytest.mark.parametrize(
    ("fault", "old", "new"),
    [
        ((":Queue.push", "replace", "a < b", "a <= b"), "(a  <  b)", "((a <= b))"),
        ((":Queue.push", "negate", "a < b"), "(a  <  b)", "((not (a < b)))"),
        ((":Queue.push", "true", "a < b"), "(a  <  b)", "(True)"),
        ((":Queue.push", "delete", "self.count += 1"), "self.count += 1", "pass"),
        ((":LIMIT", "replace", "8", "9"), "LIMIT = 8", "LIMIT = (9)"),
        (("", "replace", "LIMIT = 8", "LIMIT = 9"), "LIMIT = 8", "LIMIT = 9"),
    ],
)
def test_a_fault_is_an_operator_on_a_node_of_a_function_s_syntax_tree(planted, fault, old, new):
    assert planted(*fault) == SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((":Queue.push", "true", "a > b"), "its node stands 0 times in april.module:Queue.push"),
        ((":Queue.pop", "true", "a < b"), "its node stands 2 times in april.module:Queue.pop"),
        ((":Queue.peek", "true", "a < b"), "april.module:Queue.peek is not defined"),
        (("s", "delete", "pass"), "there is no module april.modules"),
        ((":Queue.push", "invert", "a < b"), "operator 'invert' is not one of replace, delete"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(planted, fault, reason):
    with pytest.raises(BadMutant, match=f"^mutant off-by-one: {re.escape(reason)}"):
        planted(*fault)
