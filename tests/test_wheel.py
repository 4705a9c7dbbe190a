"""The wheel is all of April: without the checkout `april quickstart` does what `launch/quickstart.sh` does."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import orjson
import pytest

from april import __version__

ROOT = Path(__file__).parent.parent
CONFIGURATIONS = ("quickstart.toml", "quickstart-sft.toml")
SOURCES = ("april", "configs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
"""all that is built from"""
FEW = {"schedule.max_steps": 2, "evaluation.prompts": 16, "learner.ranks": 1, "worker.count": 1, "run.name": "few"}


def execute(command, folder, **settings):
    """Python of an environment without the checkout."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "APRIL_"))}
    done = subprocess.run(
        command, cwd=folder, env=outer | settings, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built by `python -m build` through the source distribution, from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "april-rl" / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy)
    execute([sys.executable, "-m", "build", "--no-isolation", "--outdir", "..", "."], folder / "april-rl")
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_every_module_and_data_file(wheel):
    shipped = [path for path in (ROOT / "april").rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert held == {str(path.relative_to(ROOT)) for path in shipped} | {
            f"april/configs/{name}" for name in CONFIGURATIONS
        }
        for name in CONFIGURATIONS:
            assert archive.read(f"april/configs/{name}") == (ROOT / "configs" / name).read_bytes()
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert f"\nVersion: {__version__}\n" in archive.read(metadata).decode()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_quickstart_runs_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    execute(pip, empty)
    where = execute([sys.executable, "-c", "import april; print(april.__file__)"], empty, PYTHONPATH=str(site))
    assert where.strip() == str(site / "april/__init__.py")
    overrides = [word for key, value in FEW.items() for word in (f"--{key}", str(value))]
    said = execute([sys.executable, site / "bin/april", "quickstart", *overrides], empty, PYTHONPATH=str(site))
    assert f"report: {empty.resolve()}/runs/few/report.html" in said
    assert orjson.loads((empty / "runs/few/summary.json").read_bytes())["steps"] == FEW["schedule.max_steps"]
    assert {path.name for path in empty.iterdir()} == {"cache", "runs"}
