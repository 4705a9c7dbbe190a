"""Each planted fault is caught by the test that its promise names."""

import hashlib
import subprocess
import sys

import orjson
import pytest

from tests.mutants.catalogue import ROOT, load

PARTS = 4
"""A suite takes one of so many parts of the faults; `python -m tests.mutants` takes all."""


def chosen() -> list[str]:
    """A part of the faults that changes with the code, so that suites of several commits come to all of them."""
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "april").rglob("*.py")))).digest()
    return [name for name in load() if hashlib.sha256(code + name.encode()).digest()[0] % PARTS == 0]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_mutant_of_a_part_is_caught(tmp_path):
    verdicts, names = tmp_path / "verdicts.json", chosen()
    told = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *names, "--json", str(verdicts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert names and verdicts.exists(), told.stderr
    found = orjson.loads(verdicts.read_bytes())["verdicts"]
    assert found == dict.fromkeys(names, "caught"), told.stdout
