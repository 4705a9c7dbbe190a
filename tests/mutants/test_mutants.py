"""Each planted fault is caught by the test that its promise names."""

import subprocess
import sys

import orjson
import pytest

from tests.mutants.catalogue import ROOT, load
from tests.support.turns import has_its_turn

PARTS = 16
"""A suite takes one of so many parts of the faults; `python -m tests.mutants` takes all."""


@pytest.mark.full
@pytest.mark.always
@pytest.mark.timeout(1800)
def test_every_mutant_of_a_part_is_caught(tmp_path):
    verdicts, names = tmp_path / "verdicts.json", [name for name in load() if has_its_turn(name, PARTS)]
    told = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *names, "--json", str(verdicts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert names and verdicts.exists(), told.stderr
    found = orjson.loads(verdicts.read_bytes())["verdicts"]
    assert found == dict.fromkeys(names, "caught"), told.stdout
