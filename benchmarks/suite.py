"""The tests and the code they test: how long tests take, what they catch, how large and how divided the code is.

`--static` measures only what needs no run of the suite. Otherwise a fresh clone of HEAD is installed and tested, with
what is changed and not committed left out; `--quick` leaves out the long form.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx
import orjson
from common import ROOT, Row, parser, report

PACKAGE = ROOT / "april"
CORE = ("broker/ledger", "broker/schedules", "broker/journal", "wire")
"""Folders of ledger, schedules, journal and protocol; folders inside them do not count."""
SMALL_LINES = 120
"""Longest module that `single_importer_modules` counts (lines)."""
ENGINES = PACKAGE / "workers" / "engines"
OTHER_NAMES = (
    PACKAGE / "config", PACKAGE / "trainers" / "convert", PACKAGE / "data" / "tokenizer.py",
    PACKAGE / "workers" / "rewards" / "python_tests.py", PACKAGE / "workers" / "teachers" / "__init__.py",
)  # fmt: skip
"""Files in which an engine's name is a default, a preset, another framework's word, a kind of teacher, or the package
torch."""
OWN_ENGINE = """
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.entry import EngineEntry


class Engine(EngineEntry):
    scores = True

    @classmethod
    def from_config(cls, config, device, name):
        worker = config.worker
        return TorchEngine(
            config.model.path, worker.slots, device=device, chunk_tokens=worker.chunk_tokens, report_s=worker.report_s
        )
"""
"""A user's own engine, in one file."""
RUN_WITH_IT = """
[run]
name = "own"
dir = "{folder}/runs"
[model]
path = "{folder}/policy"
[data]
path = "{folder}/prompts.jsonl"
[reward]
name = "exact"
[schedule]
max_steps = 1
"""
MAKE_POLICY = """
import sys
from pathlib import Path
from april.learner.policy.arithmetic import build_model, save_policy
save_policy(build_model(hidden_size=64, layers=1, seed=0), Path(sys.argv[1]))
"""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--static", action="store_true", help="only what needs no run of the suite")
    arguments.add_argument("--blind", action="store_true", help="only the planted faults, by the short form")
    given = arguments.parse_args()
    if given.blind:
        rows = [mutants_caught(blind=True)]
    else:
        rows = [*sizes(), *divisions(), import_cycles(), files_touched_by_a_new_engine()]
        if not given.static:
            rows += [suite("suite_s"), mutants_caught()]
            rows += [] if given.quick else [suite("suite_all_s", "--all")]
    report(rows, given.json)


# --- what the source says ---------------------------------------------------------------------------------------------


def sizes() -> list[Row]:
    """Lines of Python: of the package, of its core, and of tests and benchmarks."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    core = [text for path, text in texts.items() if str(path.parent.relative_to(PACKAGE)) in CORE]
    around = [path.read_text() for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    return [
        Row("product_lines", [lines(texts.values())], "lines"),
        Row("code_lines", [sum(map(code_lines, texts.values()))], "lines"),
        Row("core_lines", [lines(core)], "lines"),
        Row("core_code_lines", [sum(map(code_lines, core))], "lines"),
        Row("test_and_benchmark_lines", [lines(around)], "lines"),
        Row("longest_file", [max(map(lines, ([text] for text in texts.values())))], "lines"),
    ]


def divisions() -> list[Row]:
    """How the package is divided: folders at its top, modules, small modules with one reader, ambiguous class names."""
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    classes: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text())
        for imported in imported_modules(ast.walk(tree), name, path, modules):
            importers[imported].add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).add(name)
    alone = [
        name for name, path in modules.items() if len(importers[name]) == 1 and lines([path.read_text()]) <= SMALL_LINES
    ]
    twice = {name for name, places in classes.items() if len(places) > 1}
    for name in sorted(twice):
        print("a class name in several modules:", name, *sorted(classes[name]))
    return [
        Row("rooms", [sum(path.is_dir() and path.name != "__pycache__" for path in PACKAGE.iterdir())], "folders"),
        Row("modules", [len(modules)], "modules"),
        Row("single_importer_modules", [len(alone)], "modules"),
        Row("class_names_twice", [len(twice)], "names"),
    ]


def lines(texts: Iterable[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


def code_lines(text: str) -> int:
    """Lines that are neither blank nor comments nor part of a docstring."""
    said = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in said for number, line in lines
    )


def import_cycles() -> Row:
    """Groups of modules that import each other at their top, also those that only a type checker follows."""
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(imports(name, path, modules)) for name, path in modules.items()}
    edges = [(name, imported) for name in graph for imported in graph[name]]
    cycles = [group for group in networkx.strongly_connected_components(networkx.DiGraph(edges)) if len(group) > 1]
    for group in cycles:
        print("circle of imports:", ", ".join(sorted(group)))
    return Row("import_cycles", [len(cycles)], "circles")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of April that module `name` imports at its top; a package that names its own module is left out."""
    return imported_modules(at_the_top(ast.parse(path.read_text())), name, path, modules)


def imported_modules(nodes: Iterable[ast.AST], name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of April that the import statements among `nodes` name, without module `name` itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif not isinstance(node, ast.ImportFrom):
            continue
        elif node.level:
            raise SystemExit(f"{path} has a relative import, which is not followed; name the module whole")
        else:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [imported if imported in modules else str(node.module) for imported in whole]
        yield from (imported for imported in found if imported in modules and imported != name)


def at_the_top(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports of a module's own level, in its `if` and `try` as well."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_the_top(node)


# --- what a new engine costs ------------------------------------------------------------------------------------------


def files_touched_by_a_new_engine() -> Row:
    """Its own file, and each file of April that asks for a shipped engine by its name: that has to learn the new one's.

    An engine in a file of its own, outside the package, has to pass a dry run and `april check engine`.
    """
    asking = sorted(set(files_that_name(*shipped_engines())))
    for path in asking:
        print("names a shipped engine:", path.relative_to(ROOT))
    check_an_own_engine()
    return Row("files_touched_by_a_new_engine", [1 + len(asking)], "files")


def shipped_engines() -> tuple[set[str], set[str]]:
    """Their names, and the packages that are theirs alone."""
    listing = "from april.workers.engines import ENGINES; print(*(' '.join(pair) for pair in ENGINES.shipped.items()))"
    words = output_of([sys.executable, "-c", listing], ROOT).split()
    return set(words[::2]), {entry.partition(":")[0].rpartition(".")[0] for entry in words[1::2]}


def files_that_name(engines: set[str], packages: set[str]) -> Iterator[Path]:
    """Where a name stands alone in a string, or quoted in one, or where an engine is imported; docstrings do not count,
    nor does what asks whether the package of that name is installed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if any(path.is_relative_to(folder) for folder in (ENGINES, *OTHER_NAMES)):
            continue
        tree = ast.parse(path.read_text())
        passed_over = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        passed_over |= {
            id(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec") and node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_over:
                if engines & {node.value, *re.findall(r"['\"`]([\w.-]+)['\"`]", node.value)}:
                    yield path
            elif isinstance(node, ast.ImportFrom) and any(
                f"{node.module}.".startswith(f"{package}.") for package in packages
            ):
                yield path


def check_an_own_engine() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "own_engine.py").write_text(OWN_ENGINE)
        (here / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 64)
        (here / "run.toml").write_text(RUN_WITH_IT.format(folder=folder))
        output_of([sys.executable, "-c", MAKE_POLICY, str(here / "policy")], here)
        april, engine = [sys.executable, "-m", "april.cli"], "own_engine:Engine"
        output_of([*april, "run", "run.toml", "--worker.engine", engine, "--dry-run"], here)
        output_of([*april, "check", "engine", engine], here)


def output_of(command: list[str], folder: Path, **environment: str) -> str:
    """The output of a command. Ends the benchmark if it fails."""
    everywhere = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"} | environment
    done = subprocess.run(command, cwd=folder, env=everywhere, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
    return done.stdout


# --- runs -------------------------------------------------------------------------------------------------------------


def suite(name: str, *options: str) -> Row:
    """Seconds of `launch/test.sh` in a fresh clone, installation included."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "april"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        log = Path(folder) / "log"
        began = time.monotonic()
        with log.open("w") as output:
            done = subprocess.run(
                ["bash", "launch/test.sh", *options], cwd=clone, env=environment, stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"launch/test.sh {' '.join(options)} failed:\n{log.read_text()[-10_000:]}")
    return Row(name, [seconds], "s")


def mutants_caught(blind: bool = False) -> Row:
    """Planted faults that their tests have caught, or any test of the short form."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "verdicts.json"
        command = [sys.executable, "-m", "tests.mutants", "--json", str(told), *(["--blind"] if blind else [])]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        if not told.exists():
            raise SystemExit("the planted faults were not run to their end")
        verdicts = list(orjson.loads(told.read_bytes())["verdicts"].values())
    name = "mutants_caught_blind" if blind else "mutants_caught"
    return Row(name, [verdicts.count("caught")], f"of {len(verdicts)}")


if __name__ == "__main__":
    main()
