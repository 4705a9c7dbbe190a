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
    assert mutant.new != mutant.old and is_there(mutant.caught_by)
    (row,) = [row for row in ROWS if row.promise == mutant.promise]
    assert mutant.name in row.mutants
    assert mutant.caught_by.partition("[")[0] in row.tests


def test_a_snippet_that_is_gone_or_stands_twice_is_refused(tmp_path):
    mutant = Mutant("off-by-one", "", "april", "a < b", "a <= b", "")
    (tmp_path / "april").mkdir()
    for text in ("", "a < b or a < b"):
        (tmp_path / "april" / "module.py").write_text(text)
        with pytest.raises(BadMutant, match=r"off-by-one: its old text stands \d times in april"):
            mutant.plant(tmp_path)
    (tmp_path / "april" / "module.py").write_text("return a < b\n")
    assert mutant.plant(tmp_path).read_text() == "return a <= b\n"
