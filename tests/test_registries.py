"""Parts by their names: what a name leads to, what is said of one that leads nowhere, and who may know a name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from april.config import ConfigError, load
from april.registry import FOLDERS, ROOMS, Registry, lead, look_in, registry_of
from april.workers.engines import ENGINES
from april.workers.engines.entry import EngineEntry

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "april"


class OwnEngine(EngineEntry):
    """Somebody's."""


NOT_CALLABLE = 3

NOWHERE = {
    "sglan": r"'worker.engine' = 'sglan' is no engine; did you mean 'sglang'\? use one of 'torch', .* or name your own",
    "no_such:Engine": r"importing no_such raised ModuleNotFoundError: No module named 'no_such'",
    "tests.test_registries:OwnEngin": r"tests.test_registries has no 'OwnEngin', did you mean 'OwnEngine'\?\)",
    "tests.test_registries:NOT_CALLABLE": r"it is 3, and has to be a class that derives from .*:EngineEntry",
    "tests.test_registries:Registry": "has to be a class that derives from",
    "with a space:Engine": "is no engine; use one of",
    "module:": "is no engine",
    "": "'worker.engine' = '' is no engine; use one of",
}


@pytest.mark.parametrize("name", NOWHERE)
def test_a_name_that_leads_nowhere_is_a_sentence_with_key_value_and_mend(name):
    with pytest.raises(ConfigError, match=NOWHERE[name]) as caught:
        ENGINES.find(name)
    assert str(caught.value).endswith("name your own as package.module:Name") and "\n" not in str(caught.value)


def test_a_part_of_ones_own_is_found_like_a_shipped_one():
    assert ENGINES.find("tests.test_registries:OwnEngine") is OwnEngine
    anything = Registry("a.key", "thing")
    assert anything.find("tests.test_registries:lead") is lead
    with pytest.raises(ConfigError, match=r"it is 3, which cannot be called\); name your own"):
        anything.find("tests.test_registries:NOT_CALLABLE", key="another")


def test_a_module_that_fails_when_it_is_imported_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing broken_part raised .*No module named 'no_such_package'"):
        ENGINES.find("broken_part:Engine")


def test_a_part_beside_the_configuration_is_found_by_every_process_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "beside_it.py").write_text("def reward(response): return 1.0\n")
    monkeypatch.setenv(FOLDERS, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    look_in(tmp_path)
    asked = "from april.registry import *; look_in(); print(lead('beside_it:reward')('x'))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr


SEVERAL = ("algorithm.corrections", "operations.alarms", "operations.sinks")
"""keys that name a list of parts"""


@pytest.mark.parametrize("key", ROOMS)
def test_every_shipped_part_is_found_and_every_key_is_checked_when_a_configuration_is_read(config_file, key):
    registry = registry_of(key)
    assert registry.key == key
    for name in registry.shipped:
        registry.find(name)
    value = '["no such"]' if key in SEVERAL else "no such"
    with pytest.raises(ConfigError, match=f"key '{key}' = 'no such' is no {registry.noun}"):
        load(config_file, [f"--{key}", value])


def test_a_part_of_ones_own_is_not_imported_where_a_configuration_is_only_read(config_file):
    """Not every part of a run has it: the broker needs no engine."""
    assert load(config_file, ["--worker.engine", "no_such:Engine"]).worker.engine == "no_such:Engine"


# --- who knows a name -------------------------------------------------------------------------------------------


def names_in(path: Path):
    """(line, text) of every string in a module, but for docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def own_files(registry: Registry, name: str) -> set[Path]:
    """Its module, all of the folder that is its alone, and its registry's table."""
    room = ROOT / ROOMS[registry.key].partition(":")[0].replace(".", "/")
    module = ROOT / (registry.shipped[name].partition(":")[0].replace(".", "/") + ".py")
    folder = set() if module.parent == room else set(module.parent.rglob("*.py"))
    return folder | {module, room / "__init__.py"}


CONFIGURED = ("algorithm.py", "clusters.py", "data.py", "presets.py", "sections.py", "workers.py")
CONFIGURATION = {
    *(PACKAGE / "config" / name for name in CONFIGURED),
    *(PACKAGE / "convert").glob("*.py"),
}
"""the configuration, whose defaults and presets are names; and what others call April's parts"""
ANOTHER_MEANING = {
    ("april/adapters/openrlhf.py", "truncated"): "a field of OpenRLHF's responses",
    ("april/adapters/verl.py", "april"): "what its adapter is called in verl's options",
    ("april/agents/gateway.py", "april"): "who owns the model, in the API's own form",
    ("april/agents/dialects/chat.py", "code"): "of an error, in the API's own form",
    ("april/environments/__init__.py", "environment"): "what its parts are called",
    ("april/launch/dry_run.py", "environment"): "what its processes are called",
    ("april/launch/devices.py", "torch"): "the package",
    ("april/launch/check.py", "torch"): "the package",
    ("april/data/tokenizer.py", "torch"): "the package",
    ("april/launch/quickstart.py", "torch"): "the package",
    ("april/files/objects.py", "local"): "a protocol of fsspec's",
    ("april/files/objects.py", "ssh"): "the same",
    ("april/config/addresses.py", "local"): "the same",
    ("april/rollouts/run.py", "local"): "broker and workers as children of the trainer",
    ("april/broker/telemetry/recorder.py", "environment"): "a key of metrics.jsonl",
    ("april/cli.py", "verifiers"): "a command, and the package that it is about",
    ("april/report/corrections.py", "truncated"): "a line of the picture: the share of tokens that a cap has touched",
    ("april/data/rows.py", "dapo"): "what a mapping of a published dataset says in its rows, as anybody's data do",
    ("april/data/rows.py", "deepscaler"): "the same",
    ("april/data/rows.py", "final_answer"): "the same",
    ("april/data/rows.py", "math"): "the same",
    ("april/data/rows.py", "gsm8k"): "the same",
    ("april/data/make_data.py", "final_answer"): "the same",
    ("april/cli.py", "april"): "the program",
    ("april/report/live.py", "april"): "the program",
    ("april/launch/clusters/helm.py", "april"): "the chart",
    ("april/launch/clusters/kubernetes.py", "environment"): "a value",
    ("april/launch/clusters/manifests.py", "april"): "the program",
    ("april/launch/clusters/manifests.py", "environment"): "a value",
    ("april/launch/clusters/layout.py", "april"): "the program",
}
"""names that are ordinary words, too"""


def test_no_other_file_knows_the_name_of_a_shipped_part():
    """Neither alone nor quoted in a sentence: what is asked about a part, the part says."""
    names = {name for key in ROOMS for name in registry_of(key).shipped}
    found = {
        (path, name): line
        for path in set(PACKAGE.rglob("*.py")) - CONFIGURATION
        for line, text in names_in(path)
        for name in names & {text, *re.findall(r"['\"`]([\w.-]+)['\"`]", text)}
    }
    for registry in map(registry_of, ROOMS):
        for name in registry.shipped:
            for path in own_files(registry, name):
                found.pop((path, name), None)
    places = {(str(path.relative_to(ROOT)), name): line for (path, name), line in found.items()}
    assert places.keys() <= ANOTHER_MEANING.keys(), {place: places[place] for place in places.keys() - ANOTHER_MEANING}
    assert places.keys() >= ANOTHER_MEANING.keys(), "exceptions of which there is nothing any more"
