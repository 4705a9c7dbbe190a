"""Runs tests against copies of the tree in which a fault is planted. The tree itself is only read.

A process that has imported what is heavy, and nothing of April, forks a child for each mutant. The child imports April
and the tests from its copy, also in the processes that it starts, and runs pytest there.
"""

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
"""a test that takes longer has failed: most faults that hang a program are found by that"""
LIMIT_S, BLIND_LIMIT_S = 300.0, 7200.0
"""a child that takes longer is killed, and has told nothing"""
SHORT_FORM = ("-m", "not full", "--ignore=tests/mutants", "--ignore=tests/test_promises.py")
"""without the tests that read the source text: they would see any change of it"""
WAIT_S = 0.02
OUTCOMES, LOG = "outcomes.json", "log"
NOT_COLLECTED = "not collected"


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

    def has_passed(self, test: str) -> bool:
        """Whether it ran, with all its parameters where the node id names none, and nothing of it failed."""
        found = [outcome for node, outcome in self.outcomes.items() if node == test or node.startswith(f"{test}[")]
        return bool(found) and set(found) == {"passed"}


@dataclass(eq=False)
class Outcomes:
    """A plugin of pytest that writes down what has become of each test."""

    path: Path
    wanted: set[str] | None = None
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
    """A plugin of pytest by which one child makes the tests' policy, in seconds, and the others copy it."""

    made: Path

    def pytest_sessionstart(self) -> None:
        conftest = sys.modules["tests.conftest"]
        make = conftest.make_policy

        def make_policy(folder: Path) -> Path:
            if not self.made.exists():
                shutil.copytree(make(folder), self.made)
            return Path(shutil.copytree(self.made, folder, dirs_exist_ok=True))

        conftest.make_policy = make_policy


class Tree:
    """A copy of April, its tests and what they read, in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.root = folder / "april"
        shutil.copytree(ROOT, self.root, ignore=LEFT_OUT)
        for name in LINKED:
            if (ROOT / name).exists():
                (self.root / name).symlink_to((ROOT / name).resolve())


@dataclass
class Job:
    """A child at work in a tree."""

    tree: Tree
    mutant: Mutant | None
    tests: set[str] | None
    """node ids; None: the whole short form"""
    limit_s: float

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
            run_pytest(self.tree, self.tests, first_failure=self.mutant is not None)

    def is_over(self) -> bool:
        if time.monotonic() - self.began > self.limit_s:
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


def run_pytest(tree: Tree, tests: set[str] | None, first_failure: bool) -> None:
    """In a child: become a pytest that stands in the tree, and may end with the first failure. Does not return."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(tree.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree.root)
        os.environ["PYTHONPATH"] = str(tree.root)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        forget("tests")
        sys.path[:] = [str(tree.root), *(path for path in sys.path if path and Path(path) != ROOT)]
        importlib.invalidate_caches()
        chosen = (
            SHORT_FORM if tests is None else sorted(filter(os.path.exists, {test.split("::")[0] for test in tests}))
        )
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}", *(["-x"] if first_failure else [])]
        plugins = [Outcomes(tree.folder / OUTCOMES, tests), SharedPolicy(tree.folder.parent / "policy")]
        status = pytest.main([*options, *chosen], plugins=plugins)
        home = Path(sys.modules["april"].__file__)
        if not home.is_relative_to(tree.root):
            raise RuntimeError(f"the tests took April from {home}, not from the copy")
    finally:
        os._exit(status)


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


def run_all(
    mutants: Iterable[Mutant], blind: bool, limit_s: float, trees: list[Tree]
) -> Iterator[tuple[Mutant, Result]]:
    """Each mutant with what has become of its test or, `blind`, of all, as they come; one at a time in each tree."""
    waiting, free, working = list(mutants), list(trees), []
    try:
        while waiting or working:
            while waiting and free:
                mutant = waiting.pop(0)
                job = Job(free.pop(), mutant, None if blind else {mutant.caught_by}, limit_s)
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


def run_unmutated(tests: set[str] | None, limit_s: float, tree: Tree) -> Result:
    job = Job(tree, None, tests, limit_s)
    job.start()
    try:
        while not job.is_over():
            time.sleep(WAIT_S)
    finally:
        result = job.finish()
    return result
