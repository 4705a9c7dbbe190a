"""Runs tests against copies of the tree in which a fault is planted. The tree itself is only read.

A process that has imported what is heavy, and nothing of April, forks a child for each mutant. The child imports April
and the tests from its copy, also in the processes that it starts, and runs pytest there. `in_place` imports them once.
"""

import compileall
import gc
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from py_compile import PycInvalidationMode

import orjson
import pytest

from tests.mutants.catalogue import ROOT, Mutant

HEAVY = (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "hypothesis",
    "pydantic",
    "rich",
    "zmq",
)
"""imported once for all mutants; those that are not installed are left out"""
LINKED = (".venv", ".venv-sglang", ".venv-vllm", ".venv-verl", ".venv-megatron")
"""of the tree's hidden entries, those that tests may need"""
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "dist")
TEST_LIMIT_S = 60
"""a test that takes longer with a fault has failed: most that hang a program are found by that. Without one it has the
time that it always has, since other tests may share the machine"""
SHORT = ("-m", "not full")
READERS = ("--ignore=tests/mutants", "--ignore=tests/test_promises.py")
"""tests that read the source text: they would see any change of it"""
WAIT_S = 0.02
OUTCOMES, LOG = "outcomes.json", "log"
NOT_COLLECTED = "not collected"


@dataclass(frozen=True)
class Choice:
    """Which tests are run."""

    tests: frozenset[str] | None = None
    """node ids; None: all that do not read the source text"""
    short: bool = False
    """only those of the short form"""

    @classmethod
    def all_of(cls, choices: Iterable["Choice"]) -> "Choice":
        """Of choices in one form."""
        choices = list(choices)
        named = [choice.tests for choice in choices if choice.tests is not None]
        return cls(frozenset().union(*named) if len(named) == len(choices) else None, choices[0].short)

    def split(self, parts: int) -> list["Choice"]:
        """By files into as many as have one. All tests are one part."""
        if self.tests is None:
            return [self]
        files = sorted({test.split("::")[0] for test in self.tests})
        of_parts = [set(files[number::parts]) for number in range(min(parts, len(files)))]
        return [
            Choice(frozenset(test for test in self.tests if test.split("::")[0] in part), self.short)
            for part in of_parts
        ]

    @property
    def limit_s(self) -> float:
        """A child that takes longer is killed, and has told nothing."""
        return 7200 if self.tests is None else 300 + 5 * len(self.tests)

    def arguments(self) -> list[str]:
        """Of pytest, that stands in the tree."""
        files = READERS if self.tests is None else {test.split("::")[0] for test in self.tests}
        there = sorted(file for file in files if file in READERS or Path(file).exists())
        return [*(SHORT if self.short else ()), *there]


@dataclass(frozen=True)
class Result:
    outcomes: dict[str, str]
    """passed, failed or skipped by node id; empty where pytest did not come to its end"""
    seconds: float
    log: str

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    @property
    def verdict(self) -> str:
        """caught; survived; broken, where the fault kept the tests from being run at all."""
        if self.failed:
            return "caught"
        return "survived" if self.outcomes and NOT_COLLECTED not in self.outcomes.values() else "broken"

    def has_passed(self, choice: Choice) -> bool:
        """Whether they ran, with all parameters where a node id names none, and nothing of them failed."""
        if choice.tests is None:
            return self.verdict == "survived"
        return all(self.outcomes_of(test) == {"passed"} for test in choice.tests)

    def outcomes_of(self, test: str) -> set[str]:
        return {outcome for node, outcome in self.outcomes.items() if node == test or node.startswith(f"{test}[")}


@dataclass(eq=False)
class Outcomes:
    """A plugin of pytest that writes down what has become of each test."""

    path: Path
    wanted: frozenset[str] | None = None
    """node ids, those of parametrised tests without their parameters if all are meant; None for all"""
    seen: dict[str, str] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only the wanted tests of the files that were given; one that is not there has no outcome."""
        if self.wanted is not None:
            items[:] = [item for item in items if {item.nodeid, item.nodeid.partition("[")[0]} & self.wanted]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.nodeid not in self.seen or report.skipped:
            self.seen[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.seen[report.nodeid] = NOT_COLLECTED

    def pytest_sessionfinish(self) -> None:
        self.path.write_bytes(orjson.dumps(self.seen))


@dataclass(eq=False)
class SharedPolicy:
    """A plugin of pytest by which one child of a tree makes the tests' policy, in seconds, and the others copy it."""

    made: Path

    def pytest_sessionstart(self) -> None:
        small_run = sys.modules["tests.support.small_run"]
        make = small_run.make_policy

        def make_policy(folder: Path) -> Path:
            if not self.made.exists():
                shutil.copytree(make(folder), self.made)
            return Path(shutil.copytree(self.made, folder, dirs_exist_ok=True))

        small_run.make_policy = make_policy


@dataclass(frozen=True)
class Tree:
    """A copy of April, its tests and what they read, in a folder of its own."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "april"

    @classmethod
    def of_source(cls, folder: Path) -> "Tree":
        """Compiled. Bytecode is compared with the source by its hash: a fault is seen however soon it is planted."""
        tree = cls(folder)
        shutil.copytree(ROOT, tree.root, ignore=LEFT_OUT)
        for name in LINKED:
            if (ROOT / name).exists():
                (tree.root / name).symlink_to((ROOT / name).resolve())
        compileall.compile_dir(tree.root / "april", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        return tree

    def copy(self, folder: Path) -> "Tree":
        shutil.copytree(self.root, folder / "april", symlinks=True)
        return Tree(folder)


Judged = tuple[Mutant, Result]


@dataclass
class Job:
    """A child at work in a tree."""

    tree: Tree
    mutant: Mutant | None
    choice: "Choice"

    def start(self) -> None:
        if self.mutant:
            self.file = self.mutant.find(self.tree.root)
            self.unchanged = self.file.read_text()
            self.mutant.plant(self.tree.root)
        (self.tree.folder / OUTCOMES).unlink(missing_ok=True)
        self.began = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            plugins = [Outcomes(self.tree.folder / OUTCOMES, self.choice.tests)]
            run_pytest(self.tree, self.choice.arguments(), plugins, self.mutant is None)

    def is_over(self) -> bool:
        if time.monotonic() - self.began > self.choice.limit_s:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid

    def finish(self) -> Result:
        """End the child and what it has left running, and mend its tree."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        if self.mutant:
            self.file.write_text(self.unchanged)
        told = self.tree.folder / OUTCOMES
        outcomes = orjson.loads(told.read_bytes()) if told.exists() else {}
        log = (self.tree.folder / LOG).read_text(errors="replace")
        return Result(outcomes, time.monotonic() - self.began, log)


def run_pytest(tree: Tree, arguments: list[str], plugins: list[object], whole: bool) -> None:
    """In a child: become a pytest that stands in the tree. Not `whole`, it ends with the first failure, and leaves no
    bytecode. Does not return."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(tree.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree.root)
        os.environ["PYTHONPATH"] = str(tree.root)
        if not whole:
            leave_no_bytecode()
        forget("tests")
        sys.path[:] = [str(tree.root), *(path for path in sys.path if path and Path(path) != ROOT)]
        importlib.invalidate_caches()
        options = ["-q", "-p", "no:cacheprovider", *([] if whole else ["-x", f"--timeout={TEST_LIMIT_S}"])]
        status = pytest.main([*options, *arguments], plugins=[*plugins, SharedPolicy(tree.folder / "policy")])
        home = Path(sys.modules["april"].__file__)
        if not home.is_relative_to(tree.root):
            raise RuntimeError(f"the tests took April from {home}, not from the copy")
    finally:
        os._exit(status)


def leave_no_bytecode() -> None:
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def import_heavy() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    if early := [name for name in sys.modules if name.partition(".")[0] == "april"]:
        raise RuntimeError(f"{early[0]} is imported already, so that no child would see a fault in it")
    gc.freeze()


def run_all(mutants: Iterable[Mutant], choices: dict[Mutant, Choice], trees: list[Tree]) -> Iterator[Judged]:
    """Each mutant with what has become of its tests, as they come; one at a time in each tree."""
    waiting, free, working = list(mutants), list(trees), []
    try:
        while waiting or working:
            while waiting and free:
                mutant = waiting.pop(0)
                job = Job(free.pop(), mutant, choices[mutant])
                job.start()
                working.append(job)
            for job in [job for job in working if job.is_over()]:
                working.remove(job)
                free.append(job.tree)
                yield job.mutant, job.finish()
            time.sleep(WAIT_S)
    finally:
        for job in working:
            job.finish()


def run_unmutated(choice: Choice, trees: list[Tree]) -> Result:
    """What becomes of the tests without a fault, a part of their files in each tree."""
    jobs = [Job(tree, None, part) for tree, part in zip(trees, choice.split(len(trees)), strict=False)]
    for job in jobs:
        job.start()
    results, working = [], list(jobs)
    try:
        while working:
            for job in [job for job in working if job.is_over()]:
                working.remove(job)
                results.append(job.finish())
            time.sleep(WAIT_S)
    finally:
        for job in working:
            job.finish()
    return Result(
        {test: outcome for result in results for test, outcome in result.outcomes.items()},
        max(result.seconds for result in results),
        "".join(result.log for result in results),
    )
