"""`april verifiers`: the prompts of an environment of the package `verifiers`."""

import json
from pathlib import Path
from typing import Any

from april.cli.command import command, option


@command(
    option("name", help="Name of the environment, as vf.load_environment takes it."),
    option(
        "--arguments", type=json.loads, default={}, metavar="JSON", help="JSON object of arguments of the environment."
    ),
    option("--out", type=Path, help="Folder for the rows [default: cache/NAME]."),
    option("--most", type=int, default=-1, help="Most rows to write to each file; -1: all [default: -1]."),
)
def verifiers(name: str, arguments: dict[str, Any], out: Path | None, most: int) -> int:
    """Write the rows of an environment of the package `verifiers` as prompts."""
    from april.agents.verifiers_package import write_rows

    for path in write_rows(name, arguments, out or Path("cache", name.replace("/", "-")), most):
        print(path)
    return 0
