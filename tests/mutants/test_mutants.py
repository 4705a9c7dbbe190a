"""Each planted fault is caught by the test that its promise names."""

import subprocess
import sys

import orjson
import pytest

from tests.mutants.catalogue import ROOT, load


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_mutant_is_caught(tmp_path):
    verdicts = tmp_path / "verdicts.json"
    told = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--json", str(verdicts)], cwd=ROOT, capture_output=True, text=True
    )
    assert verdicts.exists(), told.stderr
    found = orjson.loads(verdicts.read_bytes())["verdicts"]
    assert found == dict.fromkeys(load(), "caught"), told.stdout
