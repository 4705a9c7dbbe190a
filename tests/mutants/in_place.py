"""Plants faults into processes that have collected the tests of all mutants: most faults are in a function, whose code
is replaced there, and nothing is imported again.

One process for each tree collects the tests and forks a child for each mutant. The file on disk has the fault as well,
for the processes that a test starts. What is not caught in this way is left to a process that imports everything anew.
"""

import gc
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import orjson
import pytest

from tests.mutants.catalogue import Mutant
from tests.mutants.runner import OUTCOMES, TEST_LIMIT_S, WAIT_S, Outcomes, Tree, leave_no_bytecode, run_pytest

CAUGHT = "caught.jsonl"
CHILD_LIMIT_S = 120
"""Time for fixtures beside that of a test."""
WRAPPED = ("fget", "fset", "func", "__func__", "__wrapped__", "wrapped")
"""Attributes by which descriptors and decorated functions hold the function that was written."""


def caught(mutants: Iterable[Mutant], trees: list[Tree]) -> Iterator[tuple[Mutant, str, float]]:
    """The mutants that their own tests catch, which pass without them, with the failed test and the seconds that it
    took, as they come."""
    by_file = sorted(mutants, key=lambda mutant: mutant.caught_by)
    shares = {tree: by_file[number :: len(trees)] for number, tree in enumerate(trees)}
    names, working, read = {mutant.name: mutant for mutant in by_file}, {}, dict.fromkeys(trees, 0)
    sys.stdout.flush()
    for tree, share in shares.items():
        (tree.folder / CAUGHT).unlink(missing_ok=True)
        (tree.folder / CAUGHT).touch()
        if not (pid := os.fork()):
            files = sorted({mutant.caught_by.split("::")[0] for mutant in share})
            words = [*files, "--every", f"--basetemp={tree.folder / 'tmp'}", f"--timeout={TEST_LIMIT_S}"]
            run_pytest(tree, words, [Planted(tree, share)], whole=True)
        working[tree] = pid
    try:
        while working:
            for tree, pid in list(working.items()):
                over = os.waitpid(pid, os.WNOHANG)[0] == pid
                lines = (tree.folder / CAUGHT).read_bytes().splitlines()
                for line in lines[read[tree] :]:
                    name, test, seconds = orjson.loads(line)
                    yield names[name], test, seconds
                read[tree] = len(lines)
                if over:
                    del working[tree]
            time.sleep(WAIT_S)
    finally:
        for pid in working.values():
            os.killpg(pid, signal.SIGKILL)


@dataclass(eq=False)
class Planted:
    """A plugin of pytest that runs, in place of the collected tests, each mutant's own test with it."""

    tree: Tree
    mutants: list[Mutant]
    passed: dict[str, bool] = field(default_factory=dict)
    """Whether a test passes without a fault, by node id."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.collect()
        gc.freeze()
        for mutant in self.mutants:
            wanted = mutant.caught_by
            items = [item for item in session.items if wanted in (item.nodeid, item.nodeid.partition("[")[0])]
            if wanted not in self.passed:
                outcomes = self._run(items, lambda: True)
                self.passed[wanted] = bool(outcomes) and set(outcomes.values()) == {"passed"}
            if self.passed[wanted]:
                self._try(mutant, items)
        return True

    def _try(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        file, began = mutant.find(self.tree.root), time.monotonic()
        unchanged = file.read_text()
        mutant.plant(self.tree.root)
        try:
            outcomes = self._run(items, lambda: replace_code(mutant.function, file))
        finally:
            file.write_text(unchanged)
        if failed := [test for test, outcome in outcomes.items() if outcome == "failed"]:
            with (self.tree.folder / CAUGHT).open("ab") as found:
                found.write(orjson.dumps((mutant.name, failed[0], time.monotonic() - began)) + b"\n")

    def _run(self, items: list[pytest.Item], prepare: Callable[[], bool]) -> dict[str, str]:
        """What becomes of the tests in a child after `prepare`, up to the first that fails; {} where that is false, or
        the child takes too long."""
        told = self.tree.folder / OUTCOMES
        told.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                leave_no_bytecode()
                if prepare():
                    run_items(items, told)
            finally:
                os._exit(0)
        deadline = time.monotonic() + CHILD_LIMIT_S + TEST_LIMIT_S
        while os.waitpid(pid, os.WNOHANG)[0] != pid:
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(WAIT_S)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return orjson.loads(told.read_bytes()) if told.exists() else {}


def run_items(items: list[pytest.Item], told: Path) -> None:
    outcomes = Outcomes(told)
    manager = items[0].config.pluginmanager
    manager.register(outcomes)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if "failed" in outcomes.seen.values():
            break
    items[0].session._setupstate.teardown_exact(None)  # what fixtures of modules have started
    outcomes.pytest_sessionfinish()


# --- code -------------------------------------------------------------------------------------------------------------


def replace_code(name: str, file: Path) -> bool:
    """Give a function of a loaded module, named `package.module:Qualified.name`, the code that its file has now; false
    where it is no function, or its code does not fit. A module that is not loaded will be read from its file."""
    module_name, _, qualified = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        return True
    whole = compile(file.read_text(), str(file), "exec", dont_inherit=True)
    new = {(code.co_qualname, code.co_firstlineno): code for code in codes(whole)}
    replaced = False
    for function in functions(module, qualified):
        code = new.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is None or code.co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = code
        replaced = True
    return replaced


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions and classes of a module's code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def functions(module: ModuleType, qualified: str) -> list[FunctionType]:
    """The functions behind a qualified name; those of a function within another are the outer one."""
    held: Any = module
    for part in filter(None, qualified.split(".")):
        held = inspect.getattr_static(held, part, None)
        if not inspect.isclass(held):
            return list(unwrapped(held))
    return []


def unwrapped(held: Any) -> Iterator[FunctionType]:
    """The functions that a descriptor, decorated or not, was made of."""
    if isinstance(held, FunctionType) and not hasattr(held, "__wrapped__"):
        yield held
    elif isinstance(held, property | cached_property | classmethod | staticmethod) or hasattr(held, "__wrapped__"):
        for name in WRAPPED:
            if inner := getattr(held, name, None):
                yield from unwrapped(inner)
                if name != "fget":
                    return
