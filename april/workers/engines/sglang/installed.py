"""Finds the interpreter and version of a server's Python package."""

import subprocess
import sys
from pathlib import Path

import april
from april.config import Config
from april.errors import refuse

LOOK_S = 60.0
"""Longest start of the interpreter (s)."""
VERSION = """
import importlib.metadata as metadata, importlib.util as util, sys
module, *packages = sys.argv[1:]
found = [metadata.version(name) for name in packages if list(metadata.Distribution.discover(name=name))]
print(found[0] if found else "of unknown version") if util.find_spec(module) else sys.exit(3)
"""


def server_python(config: Config, name: str) -> Path:
    """The interpreter with the server's package: `engine.python`, or else that of a .venv-NAME folder.

    The folder is looked for in the working directory, next to April's environment, and in April's checkout.
    """
    folders = (Path.cwd(), Path(sys.prefix).parent, Path(april.__file__).parents[1])
    candidates = [folder / f".venv-{name.lower()}/bin/python" for folder in folders]
    return config.engine.python or next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def installed_server(config: Config, name: str, packages: tuple[str, ...]) -> str:
    """Name, version and interpreter of the server, in one text.

    `packages`: possible distribution names; the first is also the module's. Raises ConfigError.
    """
    python = server_python(config, name)
    fix = f"make it with launch/install-{name.lower()}.sh, or give the interpreter that has {name}"
    if not python.exists():
        refuse("engine.python", python, "does not exist", fix)
    try:
        command = [str(python), "-c", VERSION, *packages[:1], *packages]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        refuse("engine.python", python, f"cannot be run ({error})", fix)
    if result.returncode:
        refuse("engine.python", python, f"has no {name}", fix)
    return f"{name} {result.stdout.strip()} of {python}"
