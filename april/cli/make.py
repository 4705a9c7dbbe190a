"""`april make-policy`, `make-data`, `make-pictures` and `verifiers`: policies and prompts to begin with."""

import json
from pathlib import Path
from typing import Any

from april.cli.command import command, option


@command(
    option("--out", type=Path, default=Path("cache/policy"), help="Folder for the policy [default: cache/policy]."),
    option("--seed", type=int, default=0, help="Seed of the weights and of the demonstrations [default: 0]."),
)
def make_policy(out: Path, seed: int) -> int:
    """Make the quickstart's policy with `april sft` (about a minute; nothing if it is there already)."""
    from april.launch.sft.warm_start import make_policy

    make_policy(out, seed)
    return 0


@command(
    option("--out", type=Path, default=Path("cache/data"), help="Folder for the prompts [default: cache/data]."),
    option("--train", type=int, default=4096, help="Number of training prompts [default: 4096]."),
    option("--heldout", type=int, default=512, help="Number of held-out prompts [default: 512]."),
    option("--seed", type=int, default=0, help="Random seed of the prompts [default: 0]."),
)
def make_data(out: Path, train: int, heldout: int, seed: int) -> int:
    """Write the quickstart's prompts."""
    from april.data.arithmetic import make_data

    for path in make_data(out, train, heldout, seed):
        print(path)
    return 0


@command(
    option("--out", type=Path, default=Path("cache/pictures"), help="Folder for both [default: cache/pictures]."),
    option("--train", type=int, default=2048, help="Number of training prompts [default: 2048]."),
    option("--heldout", type=int, default=256, help="Number of held-out prompts [default: 256]."),
    option("--seed", type=int, default=0, help="Seed of pictures, weights and demonstrations [default: 0]."),
)
def make_pictures(out: Path, train: int, heldout: int, seed: int) -> int:
    """Make the task in pictures of configs/pictures.toml, and its policy (about a minute)."""
    from april.data.shapes import make_pictures
    from april.learner.policy.counting import make_counting_policy

    for path in make_pictures(out, train, heldout, seed):
        print(path)
    make_counting_policy(out / "policy", seed)
    return 0


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
