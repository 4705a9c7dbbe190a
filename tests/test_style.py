"""The code is as it is agreed on: formatted, without what ruff finds, typed, and imported in one direction.

The hooks of `.pre-commit-config.yaml` call the same tools.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
CORE = ("broker/ledger", "broker/schedules", "broker/journal", "wire")
"""what everything rests on"""
CHECKS = {
    "rules": "ruff check --no-cache",
    "format": "ruff format --check --no-cache",
    "types": "mypy --cache-dir {tmp}",
    "imports": "lint-imports --no-cache",
}
ARROWS_BACK = {
    "broker/ledger/planted.py": "april.broker.service",
    "wire/planted.py": "april.config",
    "learner/planted.py": "april.broker.ledger",
    "data/planted.py": "april.workers",
}


def call(command, folder):
    """In an environment in which `folder` is where modules come from."""
    tool, *arguments = command
    outer = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [TOOLS / tool, *arguments], cwd=folder, env=outer, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


LONG = {"types": [pytest.mark.full, pytest.mark.always]}
"""Marks of the checks that take a minute; a commit runs them, too."""


@pytest.mark.parametrize("check", [pytest.param(check, marks=LONG.get(check, [])) for check in CHECKS])
def test_the_code_is_as_agreed(check, tmp_path):
    done = call(CHECKS[check].format(tmp=tmp_path).split(), ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_finds_arrows_back_circles_and_rooms_that_nobody_has_placed(tmp_path):
    """One that names no module, or a wrong one, would be kept by anything."""
    shutil.copytree(ROOT / "april", tmp_path / "april", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for place, imported in ARROWS_BACK.items():
        (tmp_path / "april" / place).write_text(f"import {imported}\n")
    (tmp_path / "april/stray.py").touch()
    done = call(CHECKS["imports"].split(), tmp_path)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    for place, imported in ARROWS_BACK.items():
        room = ".".join(["april", *Path(place).parent.parts])
        assert f"{room} is not allowed to import {'.'.join(imported.split('.')[: room.count('.') + 1])}" in said
    assert "No cycles are allowed in april.broker." in said and "- april.stray" in said


def test_the_core_is_typed_strictly():
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"][0]
    assert strict["disallow_untyped_defs"] and strict["disallow_any_generics"]
    for room in (*CORE, "config"):
        assert (ROOT / "april" / room).is_dir()
        assert f"april.{room.replace('/', '.')}.*" in strict["module"]


@pytest.mark.parametrize(("room", "most"), [("", 500), *((room, 400) for room in CORE)])
def test_no_file_is_too_long_to_be_read_in_one_sitting(room, most):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "april" / room).rglob("*.py")}
    assert lengths and {str(path): length for path, length in lengths.items() if length > most} == {}


def test_the_hooks_call_the_same_tools_from_april_s_own_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    entries = [hook["entry"].split() for hook in hooks[0]["hooks"]]
    assert [entry[0] for entry in entries] == [f".venv/bin/{command.split()[0]}" for command in CHECKS.values()]


def test_continuous_integration_calls_the_two_commands():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    called = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert called == {"bash launch/test.sh", "bash launch/test.sh --all"}
