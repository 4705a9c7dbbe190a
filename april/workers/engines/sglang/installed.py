"""Where the package of a server is: its interpreter, found from anywhere, and the version that it has."""

import subprocess
import sys
from pathlib import Path

import april
from april.config import Config, ConfigError

LOOK_S = 60.0
"""longest start of an interpreter"""
VERSION = """
import importlib.metadata as metadata, importlib.util as util, sys
module, *packages = sys.argv[1:]
found = [metadata.version(name) for name in packages if list(metadata.Distribution.discover(name=name))]
print(found[0] if found else "of unknown version") if util.find_spec(module) else sys.exit(3)
"""


def server_python(config: Config, name: str) -> Path:
    """The interpreter that has the package: `engine.python`, or that of .venv-NAME in the working directory, beside
    April's own environment, or in its checkout."""
    folders = (Path.cwd(), Path(sys.prefix).parent, Path(april.__file__).parents[1])
    places = [folder / f".venv-{name.lower()}/bin/python" for folder in folders]
    return config.engine.python or next((place for place in places if place.exists()), places[0])


def installed_server(config: Config, name: str, packages: tuple[str, ...]) -> str:
    """Name, version and interpreter. `packages`: names that the server's may have, the first is that of its module.

    Raises ConfigError.
    """
    python = server_python(config, name)
    mend = f"make it with launch/install-{name.lower()}.sh, or give the interpreter that has {name}"
    if not python.exists():
        raise ConfigError(f"key 'engine.python' = {str(python)!r} does not exist; {mend}")
    try:
        asked = [str(python), "-c", VERSION, *packages[:1], *packages]
        said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"key 'engine.python' = {str(python)!r} cannot be run ({error}); {mend}") from None
    if said.returncode:
        raise ConfigError(f"key 'engine.python' = {str(python)!r} has no {name}; {mend}")
    return f"{name} {said.stdout.strip()} of {python}"
