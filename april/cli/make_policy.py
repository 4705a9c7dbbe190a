"""`april make-policy`: the quickstart's policy."""

from pathlib import Path

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
