"""Image recipes: their inputs are pinned, and exist."""

import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "launch/images").glob("*.Dockerfile"))
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "HEALTHCHECK", "CMD"}
HEALTH = ROOT / "launch/images/health.py"


def instructions(recipe):
    """(instruction, arguments) of each line."""
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line:
            name, _, words = line.partition(" ")
            yield name, words


def test_there_is_a_recipe_for_each_kind_of_machine():
    assert [recipe.name.partition(".")[0] for recipe in RECIPES] == ["cpu", "cuda", "rocm"]
    bases = {next(words for _, words in instructions(recipe)) for recipe in RECIPES}
    assert len(bases) == 1 and re.fullmatch(r"BASE=\S+@sha256:[0-9a-f]{64}", bases.pop())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_pinned_staged_and_not_run_as_root(recipe):
    found = list(instructions(recipe))
    names = [name for name, _ in found]
    assert set(names) <= KNOWN
    stages = [words.split() for name, words in found if name == "FROM"]
    assert len(stages) == 2 and all(words[0] == "${BASE}" for words in stages)
    last = found[len(names) - 1 - names[::-1].index("FROM") :]
    assert [words for name, words in last if name == "USER"] == ["1000:1000"]
    assert [name for name, _ in last][-2:] == ["HEALTHCHECK", "CMD"]
    assert str(HEALTH.relative_to(ROOT)) in last[-2][1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_every_file_and_command_of_a_recipe_exists(recipe):
    for name, words in instructions(recipe):
        if name == "COPY" and not words.startswith("--from=build /opt/april "):
            assert all((ROOT / path).exists() for path in words.split()[:-1]), words
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=words, text=True, check=True)
            called = [word for word in shlex.split(words) if re.match(r"launch/install[\w-]*\.sh$", word)]
            assert all(os.access(ROOT / path, os.X_OK) for path in called), words


def test_a_container_is_healthy_while_its_part_runs():
    health = SimpleNamespace(**runpy.run_path(str(HEALTH)))
    with subprocess.Popen(["sleep", "60"]) as child:
        assert health.has_child(os.getpid()) and not health.has_child(child.pid)
        child.kill()
    assert not health.says_it_is_ill("http://127.0.0.1:9/health"), "nobody listens: no broker, or one without a page"
