"""Tests have their fixtures in whatever order they are named."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_file_between_two_of_a_folder_below_it_does_not_take_the_second_its_fixtures():
    files = [f"tests/wire/{name}.py" for name in ("security/test_access_control", "test_codec", "security/test_keys")]
    plan = [sys.executable, "-m", "pytest", "-q", "--setup-plan", "-p", "no:cacheprovider", *files]
    said = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
    assert "test_keys_are_never_replaced (fixtures used: capsys, keys" in said
    assert "not found" not in said
