"""Registries: how a name is resolved to a part, how unknown names are refused, and which files may mention a name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from april.config import ConfigError, load
from april.util.registry import FOLDERS_VARIABLE, REGISTRIES, Registry, add_import_folders, import_object, registry_of
from april.workers.engines import ENGINES
from april.workers.engines.entry import EngineEntry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "april"


class OwnEngine(EngineEntry):
    """A user-defined engine."""


NOT_CALLABLE = 3

UNKNOWN = {
    "sglan": r"'worker.engine' = 'sglan' is no engine; did you mean 'sglang'\? use one of 'torch', .* or name your own",
    "no_such:Engine": r"importing no_such raised ModuleNotFoundError: No module named 'no_such'",
    "tests.util.test_registries:OwnEngin": r".* has no 'OwnEngin', did you mean 'OwnEngine'\?\)",
    "tests.util.test_registries:NOT_CALLABLE": r"it is 3, and has to be a class that derives from .*:EngineEntry",
    "tests.util.test_registries:Registry": "has to be a class that derives from",
    "with a space:Engine": "is no engine; use one of",
    "module:": "is no engine",
    "": "'worker.engine' = '' is no engine; use one of",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_refused_with_key_value_and_fix(name):
    with pytest.raises(ConfigError, match=UNKNOWN[name]) as caught:
        ENGINES.find(name)
    assert str(caught.value).endswith("name your own as package.module:Name") and "\n" not in str(caught.value)


def test_a_user_defined_part_is_found_like_a_shipped_one():
    assert ENGINES.find("tests.util.test_registries:OwnEngine") is OwnEngine
    anything = Registry("a.key", "thing")
    assert anything.find("tests.util.test_registries:import_object") is import_object
    with pytest.raises(ConfigError, match=r"it is 3"):
        anything.find("tests.util.test_registries:NOT_CALLABLE", key="another")


def test_a_module_that_cannot_be_imported_is_refused_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_part.*no_such_package"):
        ENGINES.find("broken_part:Engine")


def test_a_part_beside_the_configuration_is_found_by_every_process_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "beside_it.py").write_text("def reward(response): return 1.0\n")
    monkeypatch.setenv(FOLDERS_VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_import_folders(tmp_path)
    program = "from april.util.registry import *; add_import_folders(); print(import_object('beside_it:reward')('x'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr


LIST_KEYS = ("algorithm.corrections", "operations.alarms", "operations.sinks")
"""Keys that name a list of parts."""


@pytest.mark.parametrize("key", REGISTRIES)
def test_every_shipped_part_is_found_and_every_key_is_checked_when_a_configuration_is_read(config_file, key):
    registry = registry_of(key)
    assert registry.key == key
    for name in registry.shipped:
        registry.find(name)
    value = '["no such"]' if key in LIST_KEYS else "no such"
    with pytest.raises(ConfigError, match=f"'{key}' = 'no such' .*{registry.noun}"):
        load(config_file, [f"--{key}", value])


def test_reading_a_configuration_does_not_import_user_defined_parts(config_file):
    """Some processes of a run may lack it: the broker needs no engine."""
    assert load(config_file, ["--worker.engine", "no_such:Engine"]).worker.engine == "no_such:Engine"


# --- who knows a name -------------------------------------------------------------------------------------------


def names_in(path: Path):
    """(line, text) of every string in a module except docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def native_files(registry: Registry, name: str) -> set[Path]:
    """The part's module, all files of its own folder, and the file of its registry."""
    room = ROOT / REGISTRIES[registry.key].partition(":")[0].replace(".", "/")
    of_registry = room / "__init__.py" if room.is_dir() else room.with_suffix(".py")
    module = ROOT / (registry.shipped[name].partition(":")[0].replace(".", "/") + ".py")
    folder = set() if module.parent == room or module == of_registry else set(module.parent.rglob("*.py"))
    return folder | {module, of_registry}


CONFIGURED = (
    "broker.py", "clusters.py", "data.py", "learner.py", "presets.py", "rewards.py", "schedule.py", "sections.py",
    "training.py", "workers.py",
)  # fmt: skip
CONFIGURATION = {*(PACKAGE / "config" / name for name in CONFIGURED), *(PACKAGE / "trainers/convert").glob("*.py")}
"""Files that mention names as defaults and presets, or as translations of other frameworks' names."""
ANOTHER_MEANING = {
    ("april/trainers/adapters/openrlhf.py", "truncated"): "a field of OpenRLHF's responses",
    ("april/trainers/adapters/verl.py", "april"): "what its adapter is called in verl's options",
    ("april/agents/gateway.py", "april"): "who owns the model, in the API's own form",
    ("april/agents/dialects/chat.py", "code"): "of an error, in the API's own form",
    ("april/workers/rewards/python_tests.py", "torch"): "a package that tests use without an import",
    ("april/workers/environments/__init__.py", "environment"): "what its parts are called",
    ("april/launch/dry_run.py", "environment"): "what its processes are called",
    ("april/launch/devices.py", "torch"): "the package",
    ("april/learner/optimizers/__init__.py", "torch"): "the package",
    ("april/util/registry.py", "april"): "the package",
    ("april/data/tokenizer.py", "torch"): "the package",
    ("april/data/tokenizer.py", "transformers"): "the package",
    ("april/cli/quickstart.py", "torch"): "the package",
    ("april/util/objects.py", "local"): "a protocol of fsspec's",
    ("april/util/objects.py", "ssh"): "the same",
    ("april/config/addresses.py", "local"): "the same",
    ("april/trainers/rollouts/run.py", "local"): "broker and workers as children of the trainer",
    ("april/broker/telemetry/evaluation.py", "pass_at_k"): "a figure of an evaluation",
    ("april/broker/telemetry/sinks.py", "pass_at_k"): "the same",
    ("april/broker/ledger/row_tallies.py", "spread"): "a column",
    ("april/broker/telemetry/recorder.py", "environment"): "a key of metrics.jsonl",
    ("april/data/arithmetic.py", "final_answer"): "a field of its rows, as anybody's data name them",
    ("april/data/shapes.py", "final_answer"): "the same",
    ("april/cli/__init__.py", "april"): "the program",
    ("april/workers/rewards/sandbox_runner.py", "math"): "a module of Python",
    ("april/observe/report/live.py", "april"): "the program",
    ("april/launch/clusters/kubernetes.py", "april"): "the chart",
    ("april/launch/clusters/kubernetes.py", "environment"): "a value",
    ("april/launch/clusters/manifests.py", "april"): "the program",
    ("april/launch/clusters/manifests.py", "environment"): "a value",
    ("april/launch/clusters/launcher.py", "april"): "the program",
    ("april/workers/teachers/__init__.py", "transformers"): "a kind of teacher",
    ("april/workers/teachers/__init__.py", "sglang"): "the same",
    ("april/workers/teachers/__init__.py", "vllm"): "the same",
}
"""Mentions of a name that mean something else, by file and name."""


@pytest.mark.full
def test_no_other_file_mentions_a_shipped_part_by_name():
    """Neither as a string nor quoted in a sentence: whatever depends on a part is an attribute of it."""
    names = {name for key in REGISTRIES for name in registry_of(key).shipped}
    found = {
        (path, name): line
        for path in set(PACKAGE.rglob("*.py")) - CONFIGURATION
        for line, text in names_in(path)
        for name in names & {text, *re.findall(r"['\"`]([\w.-]+)['\"`]", text)}
    }
    for registry in map(registry_of, REGISTRIES):
        for name in registry.shipped:
            for path in native_files(registry, name):
                found.pop((path, name), None)
    places = {(str(path.relative_to(ROOT)), name): line for (path, name), line in found.items()}
    assert places.keys() <= ANOTHER_MEANING.keys(), {place: places[place] for place in places.keys() - ANOTHER_MEANING}
    assert places.keys() >= ANOTHER_MEANING.keys(), "exceptions that are no longer needed"
