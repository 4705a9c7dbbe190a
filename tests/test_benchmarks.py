"""The benchmarks go with the package as it is: each can be imported whole and says how it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

ASK_EACH_FOR_HELP = """
import runpy, sys
from pathlib import Path
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    else:
        raise AssertionError(f"{script} runs although it was asked for help")
"""


def scripts():
    return [path for path in sorted(BENCHMARKS.rglob("*.py")) if "parser(__doc__" in path.read_text()]


@pytest.mark.full
def test_each_benchmark_says_how_it_is_used():
    assert len(scripts()) > 10
    done = subprocess.run(
        [sys.executable, "-c", ASK_EACH_FOR_HELP, *map(str, scripts())], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(scripts())


def test_each_benchmark_is_described():
    page = (BENCHMARKS / "README.md").read_text()
    for path in scripts():
        assert f"`{path.relative_to(BENCHMARKS)}" in page or f"benchmarks/{path.relative_to(BENCHMARKS)}" in page, path
