"""The launch scripts: valid shell, no CUDA without an accelerator, and a second installation that does nothing.

Installations here are real ones, by the real pip, from a folder of tiny wheels.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("launch")
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1.0"
"""
BACKEND = """\
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return "tiny-1.0-py3-none-any.whl"
"""


def write_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        requirement = f"Requires-Dist: {requires}\n" if requires else ""
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirement}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(f"{name}/__init__.py", "")


class Checkout:
    """A repository with the launch scripts, an empty project, and a package folder in place of an index."""

    def __init__(self, root: Path):
        self.root, self.wheels, self.devices = root / "checkout", root / "wheels", root / "dev"
        for folder in (self.root, self.wheels, self.devices):
            folder.mkdir()
        shutil.copytree(ROOT / "launch", self.root / "launch")
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "backend.py").write_text(BACKEND)

    def install(self, *arguments: str, script: str = "install.sh", **settings: str) -> subprocess.CompletedProcess:
        outer = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "APRIL_"))}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        april = {"APRIL_PYTHON": sys.executable, "APRIL_DEVICES_DIR": str(self.devices)}
        return run_script(
            self.root / "launch" / script,
            *arguments,
            cwd="/",
            env=outer | pip | april | settings | {"PATH": self.path_without_nvidia_smi(outer["PATH"])},
        )

    @staticmethod
    def path_without_nvidia_smi(path: str) -> str:
        return os.pathsep.join(folder for folder in path.split(os.pathsep) if not Path(folder, "nvidia-smi").exists())

    @property
    def installed(self) -> set[str]:
        (site,) = self.root.glob(".venv/lib/python*/site-packages")
        return {path.name.partition("-")[0] for path in site.glob("*.dist-info")} - {"pip", "setuptools"}


def run_script(script: Path, *arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [script, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, **options
    )


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory):
    """It has the pip of this environment, copied: making one takes long."""
    path = tmp_path_factory.mktemp("empty") / ".venv"
    venv.create(path, symlinks=True)
    (site,) = path.glob("lib/python*/site-packages")
    pip = metadata.distribution("pip")
    for name in {file.parts[0] for file in pip.files if ".." not in file.parts}:
        shutil.copytree(pip.locate_file(name), site / name)
    return path


@pytest.fixture
def bare_checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def checkout(bare_checkout, empty_venv):
    """The repository with a .venv that has only pip, because creating one takes long."""
    shutil.copytree(empty_venv, bare_checkout.root / ".venv", symlinks=True)
    return bare_checkout


@pytest.fixture
def cuda_torch(checkout):
    """The torch of the default index on Linux: it needs CUDA packages."""
    write_wheel(checkout.wheels, "torch", "2.13.0", "nvidia-cudnn-cu13==9.1")
    write_wheel(checkout.wheels, "nvidia_cudnn_cu13", "9.1")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_valid_and_strict(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.full
def test_cuda_is_refused_unopened_without_an_accelerator(checkout, cuda_torch):
    (checkout.wheels / "nvidia_cudnn_cu13-9.1-py3-none-any.whl").write_text("would fail if it were opened")
    result = checkout.install()
    assert result.returncode == 1
    assert "no accelerator" in result.stderr and "APRIL_TORCH_INDEX" in result.stderr
    assert checkout.installed == set()


@pytest.mark.full
def test_cuda_can_be_accepted(checkout, cuda_torch):
    assert checkout.install(APRIL_ALLOW_CUDA="1").returncode == 0
    assert checkout.installed == {"torch", "nvidia_cudnn_cu13", "tiny"}


def test_cuda_is_installed_where_there_is_an_accelerator(checkout, cuda_torch):
    (checkout.devices / "nvidia0").touch()
    assert checkout.install().returncode == 0
    assert "nvidia_cudnn_cu13" in checkout.installed


@pytest.mark.full
def test_cpu_torch_installs_and_the_second_call_does_nothing(checkout, cuda_torch):
    write_wheel(checkout.wheels, "torch", "2.13.0+cpu")
    first = checkout.install()
    assert first.returncode == 0, first.stderr
    assert checkout.installed == {"torch", "tiny"}
    shutil.rmtree(checkout.wheels)
    for extras in ("dev", "all"):
        assert checkout.install(extras).stdout == f"april: already installed ({extras})\n"
    (checkout.root / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert "installing" in checkout.install().stdout


@pytest.mark.full
def test_an_unreachable_index_is_not_called_a_cuda_problem(checkout):
    result = checkout.install()
    assert result.returncode == 1
    assert "pip could not install torch==2.13.0" in result.stderr and "would bring CUDA" not in result.stderr


@pytest.mark.full
def test_a_missing_venv_is_made(bare_checkout):
    write_wheel(bare_checkout.wheels, "torch", "2.13.0")
    assert "making .venv" in bare_checkout.install().stdout
    assert bare_checkout.installed == {"torch", "tiny"}


def test_no_python_is_one_sentence(bare_checkout):
    result = bare_checkout.install(APRIL_PYTHON="/nonexistent/python")
    assert result.returncode == 1
    assert result.stderr.startswith("april: no Python 3.11 or newer was found at /nonexistent/python; ")
    assert not (bare_checkout.root / ".venv").exists()


def test_a_broken_venv_is_one_sentence(bare_checkout):
    (bare_checkout.root / ".venv").mkdir()
    result = bare_checkout.install()
    assert result.returncode == 1 and "remove that folder" in result.stderr


@pytest.mark.parametrize("part", ["broker", "worker", "learner"])
def test_parts_print_their_usage(part):
    script = ROOT / "launch" / f"{part}.sh"
    asked, empty = run_script(script, "-h"), run_script(script)
    assert asked.returncode == 0 and f"launch/{part}.sh CONFIG" in asked.stdout
    assert empty.returncode == 2 and f"launch/{part}.sh CONFIG" in empty.stderr


@pytest.fixture
def config(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("")
    path = tmp_path / "config.toml"
    path.write_text(f'[model]\npath = "{tmp_path}/policy"\n[data]\npath = "{tmp_path}/data.jsonl"\n')
    return path


def run_part(tmp_path: Path, part: str, *arguments: str) -> subprocess.CompletedProcess:
    """A launcher of a checkout without .venv, where `april` and modules of Python only say how they were called."""
    shutil.copytree(ROOT / "launch", tmp_path / "checkout" / "launch")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "april").write_text('#!/bin/sh\necho april "$@"\n')
    (tools / "april").chmod(0o755)
    (tools / "python").write_text(f'#!/bin/sh\n[ "$2" = - ] && exec {sys.executable} "$@"\necho python "$@"\n')
    (tools / "python").chmod(0o755)
    script = tmp_path / "checkout" / "launch" / f"{part}.sh"
    return run_script(script, *arguments, env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})


def test_the_learner_has_the_ranks_of_its_configuration(tmp_path, config):
    arguments = (str(config), "--connect", "tcp://10.0.0.5:5555", "--learner.ranks", "4")
    result = run_part(tmp_path, "learner", *arguments)
    ranks = ["python", "-P", "-m", "april.learner.launch", "--nproc-per-node", "4", "-m", "april.learner"]
    assert result.stdout.split() == [*ranks, *arguments]


def test_the_learner_refuses_a_bad_configuration_in_one_sentence(tmp_path, config):
    result = run_part(tmp_path, "learner", str(config), "--learner.rank", "4")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == "unknown key 'learner.rank' = 4; did you mean 'learner.ranks'?\n"


def test_a_worker_without_a_name_gets_one(tmp_path, config):
    result = run_part(tmp_path, "worker", str(config), "--connect", "tcp://10.0.0.5:5555")
    assert result.stdout.startswith(f"april worker {config} --connect tcp://10.0.0.5:5555 --name ")


@pytest.mark.full
@pytest.mark.parametrize(("name", "version"), [("SGLang", "0.5.23"), ("vLLM", "0.32.0")])
def test_a_server_has_an_environment_of_its_own_and_the_second_call_does_nothing(checkout, name, version):
    """With an accelerator the ordinary package is installed; the suite itself runs on the CPU builds."""
    package = name.lower()
    (checkout.devices / "nvidia0").touch()
    write_wheel(checkout.wheels, package, version)
    shutil.copytree(checkout.root / ".venv", checkout.root / f".venv-{package}", symlinks=True)
    first = checkout.install(script=f"install-{package}.sh")
    assert first.returncode == 0, first.stderr
    assert list(checkout.root.glob(f".venv-{package}/lib/python*/site-packages/{package}-{version}.dist-info"))
    assert checkout.installed == set(), "April's own environment is left alone"
    shutil.rmtree(checkout.wheels)
    assert checkout.install(script=f"install-{package}.sh").stdout == f"april: {name} is already installed\n"
