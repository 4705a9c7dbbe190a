"""Tests have their fixtures in whatever order they are named, and none is left out unseen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.turns import PARTS, has_its_turn, name_of_turn

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_a_file_between_two_of_a_folder_below_it_does_not_take_the_second_its_fixtures():
    files = [f"tests/wire/{name}.py" for name in ("security/test_access_control", "test_codec", "security/test_keys")]
    plan = [sys.executable, "-m", "pytest", "-q", "--setup-plan", "-p", "no:cacheprovider", *files]
    said = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
    assert "test_keys_are_never_replaced (fixtures used: capsys, conversations, keys" in said
    assert "not found" not in said


@pytest.mark.full
def test_a_test_may_be_skipped_for_want_of_a_gpu_alone(tmp_path):
    skipped = "import pytest\n@pytest.mark.skip(reason={!r})\ndef test_one(): ...\n"
    for name, reason in (("gpu", "needs a GPU"), ("verl", "needs .venv-verl")):
        (tmp_path / f"test_{name}.py").write_text(skipped.format(reason))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "tests.refused_skips",
        "-c",
        os.devnull,
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "2 skipped" in done.stdout
    assert done.stdout.count("needs a GPU") == 1 and "not because: needs .venv-verl" in done.stdout


def test_long_tests_take_turns_and_all_come_to_have_one():
    names = [f"test_{number}" for number in range(400)]
    had = [{name for name in names if has_its_turn(name, PARTS, bytes([state]))} for state in range(32)]
    assert all(60 < len(each) < 140 for each in had) and set().union(*had) == set(names)


@pytest.mark.turn("what is slow to make")
def test_tests_that_share_their_time_have_their_turn_together(request):
    assert name_of_turn(request.node) == "tests/test_collection.py::what is slow to make"
