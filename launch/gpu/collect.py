"""Downloads the wheels that a host without a network lacks: what is needed, and what that needs, but not what it has.

    python launch/gpu/collect.py .gpu 'april-rl[learner,worker]'
    python launch/gpu/collect.py .gpu-vllm vllm==0.24.0 --without flashinfer-python,tilelang

The folder gets the wheels for CPython 3.12 on x86-64. pip itself would first fetch torch and all that it needs, to
learn what the host has anyway.
"""

import argparse
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
GLIBC = (39, 38, 35, 34, 31, 28, 27, 26, 24, 17)
"""Minor versions of glibc that wheels may be built for; pip takes each only if it is named."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
TARGET = ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12"]
MARKERS = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("folder", type=Path, help="emptied of wheels first")
    arguments.add_argument("needs", nargs="+", type=Requirement, help="as pip takes them; april-rl is this checkout")
    arguments.add_argument("--without", default="", metavar="NAMES", help="packages that are left out, with commas")
    options = arguments.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    without = map(canonicalize_name, options.without.split(","))
    there = read_host(ROOT / "launch/gpu/host.txt") | dict.fromkeys(without, "")
    wanted, packed = [each for need in options.needs for each in expanded(need)], {}
    while wanted:
        missing = [need for need in wanted if not is_there(need, there) and canonicalize_name(need.name) not in packed]
        if missing:
            download(folder, missing)
        wheels = {parse_wheel_filename(wheel.name)[0]: wheel for wheel in folder.glob("*.whl")}
        new = {name: wheel for name, wheel in wheels.items() if name not in packed}
        packed |= new
        wanted = [need for wheel in new.values() for need in needs_of_wheel(wheel)]


def read_host(path: Path) -> dict[str, str]:
    """Versions by package name, empty where the file does not say."""
    lines = (line.partition("#")[0].strip().partition("==") for line in path.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in lines if name}


def is_there(need: Requirement, there: dict[str, str]) -> bool:
    """Whether the host has it. Ends the program if it has a version that does not do."""
    name = canonicalize_name(need.name)
    if there.get(name) and not need.specifier.contains(there[name], prereleases=True):
        sys.exit(f"collect.py: the host has {name} {there[name]}, and {need} is needed")
    return name in there


def expanded(need: Requirement) -> list[Requirement]:
    """The need itself, or in place of April what it needs with these extras."""
    if canonicalize_name(need.name) != "april-rl":
        return [need]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [project["optional-dependencies"][extra] for extra in sorted(need.extras)]
    return [Requirement(each) for needs in (project["dependencies"], *optional) for each in needs]


def needs_of_wheel(wheel: Path) -> list[Requirement]:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
        metadata = message_from_string(archive.read(name).decode())
    needs = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [need for need in needs if need.marker is None or need.marker.evaluate(MARKERS)]


def download(folder: Path, needs: list[Requirement]) -> None:
    words = [f"{need.name}{need.specifier}" for need in needs]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-qq", "--no-deps"]
    done = subprocess.run([*pip, "-d", folder, *TARGET, *platforms, *words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"collect.py: pip could not download {', '.join(words)}:\n{done.stderr}")


if __name__ == "__main__":
    main()
